"""Loading EAGLE's heads: the original format, speculators' "eagle" and NVIDIA's export."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jspec import tree
from jspec.models import decoder
from jspec.models.config import Reader
from jspec.models.heads import Head
from jspec.models.heads.eagle1 import Config, make, weights
from jspec.models.layers import random_params
from jspec.sampling.drafters import DraftConfig, eagle_dynamic, eagle_static
from jspec.types import Drafter, Params
from jspec.weights.base import Source, load_params
from jspec.weights.heads.base import HeadKind, complete, grown_shape, tree_size
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

# The file is often the target's own config.json; the head is a dense Llama layer even so.
TARGETS_OWN = frozenset(
    """num_local_experts num_experts_per_tok output_router_logits router_aux_loss_coef
    router_jitter_noise""".split()
)


def load(
    config: Mapping[str, Any], source: Source, target: Checkpoint, dtype: Any, **kernels: Any
) -> tuple[Head, Params, Config]:
    """The head, its params (the target's embedding and head among them) and its settings."""
    speculators = config.get("speculators_model_type") is not None
    parsed = read_speculators(config, source) if speculators else read_original(config, source)
    check_vocabulary(source.path, parsed.decoder.vocab_size, target)
    check_hidden_size(source.path, "reads features", parsed.decoder.hidden_size, target)
    if speculators:
        tree = weights(parsed, ["transformer"], "fusion_fc", ["embedding_layernorm", "pre_lm_head_layernorm"])
    else:
        roots = [f"layers.{index}" for index in range(parsed.decoder.layers)]
        tree = weights(parsed, roots, norms=["", "norm"])
    params = load_params(tree, source, dtype)
    params |= {"embed": shared_embedding(params, target)} | target_head(target)
    return make(parsed, dtype=dtype, **kernels), params, parsed


def read_original(config: Mapping[str, Any], source: Source) -> Config:
    """The original format, and NVIDIA's, which has an ``eagle_config`` with the norms in it."""
    read = Reader(config)
    extra = read.nested("eagle_config")
    read.seen |= NOTES | TARGETS_OWN | {"speculators_model_type", "draft_vocab_size"}
    for key, expected in (("use_aux_hidden_state", False), ("use_mtp_layernorm", False)):
        extra.require(key, expected)
    extra.seen |= NOTES | {"eagle_aux_hidden_state_layer_ids", "next_layer_regular"}
    extra.require("parallel_draft_step", 1)
    parsed = Config(
        decoder=decoder_config(read, source.tensors, "layers.0"),
        fc_bias=read.flag("bias", default=True),
        first_norm=extra.flag("use_input_layernorm_in_first_layer"),
        final_norm=extra.flag("use_last_layernorm"),
        own_embed="embed_tokens.weight" in source.tensors,
    )
    read.done()
    return parsed


def read_speculators(config: Mapping[str, Any], source: Source) -> Config:
    """The format that speculators wrote until 2025, of EAGLE's and HASS's (arXiv 2408.15766) heads."""
    read = Reader(config)
    inner = layer_config(read)
    read.seen |= NOTES | {"speculators_model_type", "tie_word_embeddings"}
    norms = read.flag("layernorms")
    layers = decoder_config(inner, source.tensors, "transformer")
    if layers.layers != 1:  # there it is the target's count: the file has one layer
        layers = replace(layers, layers=1)
    parsed = Config(
        decoder=layers,
        fc_bias=read.flag("fusion_bias"),
        embed_norm=norms,
        first_norm=norms,
        final_norm=norms,
        own_embed="embed_tokens.weight" in source.tensors,
    )
    read.done()
    return parsed


def recognise(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """By speculators' name, or by the map and the first layer that every file has."""
    if (named := config.get("speculators_model_type")) is not None:
        return named == "eagle"
    return "fc.weight" in tensors and any(name.startswith("layers.0.") for name in tensors)


def drafter(head: Any, config: DraftConfig, vocab_size: int, context_length: int, drawn: bool) -> Drafter:
    """Chain, static or dynamic tree of an EAGLE head, 1 to 3."""
    kind, depth, topk = grown_shape(head, config, "chain", context_length)
    if kind == "dynamic":
        size = tree_size(config, 31, topk + (depth - 1) * topk**2, topk, depth)
        return eagle_dynamic(head, size=size, depth=depth, topk=topk, vocab_size=vocab_size)
    shape = tree.chain_shape(depth)
    if kind == "static":
        size = tree_size(config, 25, complete(topk, depth), topk, depth)
        own = any(x is not None for x in (config.tree_size, config.tree_depth, config.tree_topk))
        shape = tree.likeliest(size, depth, topk) if own else tree.EAGLE_TREE
    return eagle_static(head, shape, vocab_size=vocab_size, drawn=drawn)


def random(target: decoder.Config, params: Params, dtype: str) -> tuple[Head, Params]:
    """A head with random weights."""
    config = Config(target)
    own = random_params(weights(config, ["layers.0"]), 1, dtype=dtype)
    return make(config, dtype=dtype), own | {"embed": params["embed"], "head": params["head"]}


KIND = HeadKind("eagle", recognise, load, drafter, random, "fc.weight with layers.0.*")
