"""Loading EAGLE-3's heads: the original format, SpecForge's, speculators' and NVIDIA's export.

They agree on the tensors but for the name of the first layer, and differ in what the
numbers of the feature layers mean and in what a missing key means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from jspec.errors import JspecError
from jspec.models import decoder
from jspec.models.config import Reader, unsupported
from jspec.models.decoder import FINAL
from jspec.models.heads import Head
from jspec.models.heads.eagle3 import Config, make, weights
from jspec.models.layers import random_params
from jspec.types import Params
from jspec.weights.base import Source, load_params
from jspec.weights.heads.base import HeadKind
from jspec.weights.heads.eagle1 import drafter
from jspec.weights.heads.files import draft_ids
from jspec.weights.heads.settings import (
    NOTES,
    check_hidden_size,
    check_vocabulary,
    decoder_config,
    layer_config,
    shared_embedding,
    target_head,
)
from jspec.weights.load import Checkpoint

BESIDE = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that are no params: the vocabulary's tables, and what a trainer may leave behind."""
FEATURE_LAYERS = "eagle_aux_hidden_state_layer_ids"


def load(
    config: Mapping[str, Any], source: Source, target: Checkpoint, dtype: Any, **kernels: Any
) -> tuple[Head, Params, Config]:
    """The head, its params (with what it takes of the target's among them) and its settings."""
    parsed, tied = read_config(config, source, target)
    _check(parsed, source, target)
    total, ids = target.config.vocab_size, None
    if "d2t" in source.tensors:
        ids = draft_ids(source, "d2t", parsed.draft_vocab, total)
    elif parsed.draft_vocab != total:
        raise JspecError(
            f"{source.path} has no d2t, which says what the {parsed.draft_vocab} draft tokens are among "
            f"the target's {total}"
        )
    tree = weights(parsed, roots(source.tensors, parsed.decoder.layers))
    params = load_params(tree, source, dtype, ignore=BESIDE)
    params["embed"] = shared_embedding(params, target)
    if not parsed.own_head:
        params |= {"rows": params["embed"]} if tied else target_head(target)
    if ids is not None and parsed.draft_vocab != total:  # else increasing ids are the same ids
        params["ids"] = jnp.asarray(ids, jnp.int32)
    return make(parsed, dtype=dtype, **kernels), params, parsed


def roots(tensors: Collection[str], layers: int) -> list[str]:
    """How the names of each layer's tensors begin."""
    if any(name.startswith("midlayer.0.") for name in tensors):
        return [f"midlayer.{index}" for index in range(layers)]
    first = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    return [first, *(f"layers.{index}" for index in range(1, layers))]


def read_config(config: Mapping[str, Any], source: Source, target: Checkpoint) -> tuple[Config, bool]:
    """The settings, and whether the embedding is the head too. Raises `JspecError`."""
    speculators = config.get("speculators_model_type") is not None
    read = Reader(config)
    inner = layer_config(read) if speculators else read
    extra = read.nested("eagle_config")
    read.seen |= NOTES | {"speculators_model_type", "transformer_layer_config"}
    tensors = source.tensors
    layers = decoder_config(
        inner, tensors, roots(tensors, 1)[0], head_norms=speculators and inner.get("model_type") == "qwen3"
    )
    words = read.integer("truncated_vocab_size", default=layers.vocab_size)
    draft_vocab = read.integer("draft_vocab_size", default=words)
    target_hidden_size = read.integer("target_hidden_size", default=layers.hidden_size)
    fuses = _read_extra(extra)
    tied = read.flag("tie_word_embeddings")
    # A head that may be the target's, or the embedding, is where it fits; else the file lacks it.
    fits = draft_vocab == layers.vocab_size and (tied or layers.hidden_size == target.config.hidden_size)
    parsed = Config(
        decoder=layers,
        draft_vocab=draft_vocab,
        feature_layers=read_feature_layers(read, extra, target, fuses),
        target_hidden_size=target_hidden_size,
        fc=fuses,
        fc_bias=read.flag("bias"),
        norm_before_fc=read.flag("norm_before_fc") | extra.flag("norm_before_fc"),
        fc_norm=read.flag("fc_norm"),
        # vLLM takes a missing key of speculators' as true, and so do we.
        norm_before_residual=read.flag("norm_before_residual", default=speculators),
        final_norm=extra.flag("use_last_layernorm", default=True),
        norm_output=read.flag("norm_output") | extra.flag("return_hidden_post_norm"),
        own_embed="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors or not fits,
    )
    if parsed.norm_before_fc and parsed.fc_norm:
        raise unsupported("fc_norm", True, "not with norm_before_fc")
    read.done()
    return parsed, tied


def _read_extra(extra: Reader) -> bool:
    """NVIDIA's ``eagle_config``: refuse what is other maths; whether the head reads several layers."""
    extra.seen |= NOTES
    extra.require("use_input_layernorm_in_first_layer", True)
    extra.require("use_mtp_layernorm", False)
    extra.require("next_layer_regular", True)
    extra.require("eh_proj_before_attn", False)
    extra.require("parallel_draft_step", 1)
    return extra.flag("use_aux_hidden_state", default=True)


def read_feature_layers(read: Reader, extra: Reader, target: Checkpoint, fuses: bool) -> tuple[int, ...]:
    """The feature layers, k being the stream after k layers, in ascending order.

    Without ``fuses`` the one feature is the last state, after its norm. At the top level vLLM and
    speculators count so; NVIDIA's ``eagle_config`` and DeepSpec's ``target_layer_ids`` number
    the layers from 0 and mean what comes out of them.
    """
    named = ((read, FEATURE_LAYERS, 0), (extra, FEATURE_LAYERS, 1), (read, "target_layer_ids", 1))
    found = [(ids, shift) for reader, key, shift in named if (ids := reader.integers(key))]
    layers = target.config.layers
    if (made_for := read.integer("num_target_layers", default=layers)) != layers:
        raise JspecError(f"the head is for a target of {made_for} layers, and {target.path} has {layers}")
    if not fuses:
        return (FINAL,)
    ids, shift = found[0] if found else ([2, layers // 2, layers - 3], 0)
    feature_layers = tuple(sorted({index + shift for index in ids}))
    if not found and (len(feature_layers) < 3 or feature_layers[0] < 0):
        raise JspecError(
            f"the head reads layers 2, L/2 and L-3 of its target, and {target.path} has L = {layers} layers"
        )
    if bad := [index for index in feature_layers if not 0 <= index <= layers]:
        raise JspecError(
            f"the head reads its target after {bad[-1]} layers, and {target.path} has {layers} layers"
        )
    return feature_layers


def _check(config: Config, source: Source, target: Checkpoint) -> None:
    """Raise `JspecError` where the head was made for another target."""
    folder, hidden_size = source.path, config.decoder.hidden_size
    check_vocabulary(folder, config.decoder.vocab_size, target)
    check_hidden_size(folder, "reads features", config.target_hidden_size, target)
    if config.draft_vocab > config.decoder.vocab_size:
        raise JspecError(
            f"{folder}: draft_vocab_size {config.draft_vocab} is more than vocab_size "
            f"{config.decoder.vocab_size}"
        )
    if not config.own_embed:
        check_hidden_size(folder, "has no embed_tokens.weight, and its stream is", hidden_size, target)
    if not config.fc and hidden_size != config.target_hidden_size:
        raise JspecError(
            f"{folder} takes a feature of width {config.target_hidden_size} for its stream of {hidden_size}"
        )
    held = source.tensors.get("fc.weight")
    count = len(config.feature_layers)
    total = count * config.target_hidden_size
    if config.fc and held is not None and len(held.shape) == 2 and held.shape[1] != total:
        raise JspecError(
            f"{folder}: fc.weight reads {held.shape[1]} numbers, and {count} feature layers of "
            f"width {config.target_hidden_size} give {total}"
        )


def recognise(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """By speculators' name, the architecture's, or the tensors that no other kind has."""
    if (named := config.get("speculators_model_type")) is not None:
        return named == "eagle3"
    names = config.get("architectures")
    if isinstance(names, list) and any("Eagle3" in str(name) for name in names):
        return True
    return "layers.0.hidden_norm.weight" in tensors or any(n.startswith("midlayer.") for n in tensors)


def random(target: decoder.Config, params: Params, dtype: str) -> tuple[Head, Params]:
    """A head with random weights, and with a vocabulary of its own without one of the target's tokens."""
    vocab = target.vocab_size
    config = Config(target, vocab - 1, feature_layers=(0, 1), target_hidden_size=target.hidden_size)
    own = random_params(weights(config, ["midlayer"]), 1, dtype=dtype)
    ids = [token for token in range(vocab) if token != 2]
    return make(config, dtype=dtype), own | {"embed": params["embed"], "ids": jnp.array(ids, jnp.int32)}


TENSORS = "midlayer.* or layers.0.hidden_norm.weight"
KIND = HeadKind("eagle3", recognise, load, drafter, random, TENSORS)
