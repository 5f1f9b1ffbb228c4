"""What the config.json of a draft head says about its layers, in the formats of several trainers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jspec.errors import JspecError
from jspec.models import decoder, llama, qwen3
from jspec.models.config import Reader
from jspec.models.qwen2 import upper_windows
from jspec.models.rope import read_ropes
from jspec.types import Params
from jspec.weights.load import Checkpoint

# Notes of trainers and servers, which do not touch the maths.
NOTES = frozenset(
    """speculators_version speculators_config embed_requires_grad enable_sp_ulysses has_no_defaults_at_init
    base_model_name_or_path target_model_type num_eagle_features has_lm_head eagle_decoder_type
    parallel_draft_heads_num_layers position_embedding_type ttt_steps ttt_length version target_vocab_size
    """.split()
)

LAYERS: dict[str, Mapping[str, Any]] = {"llama": llama.DEFAULTS, "qwen3": qwen3.DEFAULTS}
"""``model_type`` of a ``transformer_layer_config`` -> what its missing keys mean: transformers leaves
out of an inner config what equals the class's default."""


def layer_config(read: Reader) -> Reader:
    """The ``transformer_layer_config`` of a speculators file, whole. Raises `ConfigError`."""
    inner = read.nested("transformer_layer_config")
    if not inner.config:
        raise read.error("transformer_layer_config", "an object with the settings of the layers")
    kind = inner.text("model_type", default="llama")
    if kind not in LAYERS:
        raise inner.unsupported("model_type", f"{', '.join(LAYERS)} are")
    inner.fill(LAYERS[kind])
    return inner


def decoder_config(
    read: Reader, tensors: Collection[str], root: str, head_norms: bool = False
) -> decoder.Config:
    """The layers of a head; ``root`` begins the names of the first one's tensors.

    Rope settings are the head's own: where it has none they are plain, base 10000,
    whatever the target's are. q and k have norms where ``head_norms`` or the tensors say so.
    """
    read.require("hidden_act", "silu")
    read.require("pretraining_tp", 1)
    # Which array the head is, is said elsewhere: a decoder's own flag would mislead.
    sizes = decoder.shapes(read, llama.DEFAULTS) | {"tied": False}
    if upper_windows(read, sizes["layers"]):
        raise read.unsupported("use_sliding_window", "a head sees the whole text")
    attention = read.flag("attention_bias")
    return decoder.Config(
        **sizes | read_ropes(read, sizes),
        attention_bias=read.flag("qkv_bias", default=attention),
        # Some trainers' bias is of q, k and v alone.
        output_bias=attention and f"{root}.self_attn.o_proj.bias" in tensors,
        mlp_bias=read.flag("mlp_bias"),
        head_norms=head_norms or f"{root}.self_attn.q_norm.weight" in tensors,
    )


def check_vocabulary(folder: Path, vocabulary: int, target: Checkpoint) -> None:
    """Raise `JspecError` for a head of a target with other tokens."""
    if vocabulary != target.config.vocab_size:
        raise JspecError(
            f"{folder} is a head for a target of {vocabulary} tokens, and {target.path} has "
            f"{target.config.vocab_size}"
        )


def check_hidden_size(folder: Path, what: str, hidden_size: int, target: Checkpoint) -> None:
    """Raise `JspecError` for a head that was made for a target of another width."""
    if hidden_size != target.config.hidden_size:
        raise JspecError(
            f"{folder} {what} of width {hidden_size}, and {target.path} has a width of "
            f"{target.config.hidden_size}"
        )


def target_head(target: Checkpoint) -> dict[str, Array]:
    """The target's own head as a draft head has it: the same array."""
    if "head" in target.params:
        return {"head": target.params["head"]}
    return {"rows": target.params["embed"]}


def shared_embedding(params: Params, target: Checkpoint) -> Array:
    """The embedding that a head's params should have: the target's own array, unless theirs differs."""
    given, own = target.params["embed"], params.get("embed", target.params["embed"])
    # Files often hold a copy, and it may be of a gigabyte.
    same = own is given or bool(jnp.array_equal(own.astype(given.dtype), given))
    return given if same else own
