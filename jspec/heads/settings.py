"""What the config.json of a draft head says about its layers, in the formats of several trainers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jspec.checkpoint import Checkpoint
from jspec.errors import JspecError
from jspec.models import decoder
from jspec.models.config import ConfigError, Reader, unsupported
from jspec.models.qwen2 import upper_windows
from jspec.types import Params

# Notes of trainers and servers, which do not touch the maths.
NOTES = frozenset(
    """speculators_version speculators_config embed_requires_grad enable_sp_ulysses has_no_defaults_at_init
    base_model_name_or_path target_model_type num_eagle_features has_lm_head eagle_decoder_type
    parallel_draft_heads_num_layers position_embedding_type ttt_steps ttt_length version target_vocab_size
    """.split()
)

# transformers leaves out of a nested config what equals the class's default.
_COMMON: dict[str, Any] = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32
)
_COMMON |= dict(num_attention_heads=32, max_position_embeddings=2048, hidden_act="silu", rms_norm_eps=1e-6)
_QWEN3: dict[str, Any] = dict(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768)
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen3": {**_COMMON, **_QWEN3, "num_key_value_heads": 32, "head_dim": 128},
}
"""``model_type`` of a ``transformer_layer_config`` -> what its missing keys mean."""


def nested(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside a config.json; empty where there is none. Raises `ConfigError`."""
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"config.json: {key} = {value!r} should be an object")
    return value or {}


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``transformer_layer_config`` of a speculators file, whole. Raises `ConfigError`."""
    inner = nested(config, "transformer_layer_config")
    if not inner:
        raise ConfigError("config.json has no 'transformer_layer_config'")
    kind = inner.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise unsupported("transformer_layer_config.model_type", kind, f"{', '.join(DEFAULTS)} are")
    return {**DEFAULTS[kind], **{key: value for key, value in inner.items() if value is not None}}


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
    sizes = decoder.shapes(read, max_position_embeddings=2048) | {"tied": False}
    if upper_windows(read, sizes["layers"]):
        raise unsupported("use_sliding_window", True, "a head sees the whole text")
    attention = read.flag("attention_bias")
    return decoder.Config(
        **sizes,
        rope=read.rope(),
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


def check_width(folder: Path, what: str, width: int, target: Checkpoint) -> None:
    """Raise `JspecError` for a head that was made for features of another width."""
    if width != target.config.width:
        raise JspecError(
            f"{folder} {what} of width {width}, and {target.path} has a width of {target.config.width}"
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
