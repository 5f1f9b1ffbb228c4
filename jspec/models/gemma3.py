"""The Gemma 3 family, text only (arXiv 2503.19786).

Local layers see a window and rotate by a small base, global ones see everything; norms
stand before and after attention and MLP, and on each head of q and k; the embedding is
multiplied by sqrt(D) and is the head too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models.config import FULL, SLIDING, ConfigError, Reader, parse_rope, unsupported
from jspec.models.decoder import Config, make, shapes, weights
from jspec.models.layers import Rope, gelu_tanh, rms_norm_around_one

__all__ = ["Config", "from_hf", "make", "weights"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: gemma3_text``.

    The score cap is applied where the config has one, although transformers 5 reads
    it and leaves it out. Raises `ConfigError`, naming the key, for a missing or
    malformed value and for one that asks for maths this family does not have.
    """
    read = Reader(config)
    read.require("hidden_activation", "gelu_pytorch_tanh")
    read.require("use_bidirectional_attention", False)
    sizes = shapes(read, head_dim=256, max_position_embeddings=131072, tie_word_embeddings=True)
    bias = read.flag("attention_bias")
    rope, window_rope = _ropes(read)
    result = Config(
        **sizes,
        rope=rope,
        windows=_windows(read, sizes["layers"]),
        window_rope=window_rope,
        attention_bias=bias,
        output_bias=bias,
        head_norms=True,
        post_norms=True,
        scale=read.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        embed_scale=sizes["width"] ** 0.5,
        attention_softcap=read.optional_number("attn_logit_softcapping"),
        final_softcap=read.optional_number("final_logit_softcapping"),
        activation=gelu_tanh,
        norm=rms_norm_around_one,
    )
    read.done()
    return result


def _windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """By ``layer_types``, or every layer local but each ``sliding_window_pattern``-th."""
    pattern = read.integer(
        "sliding_window_pattern", default=read.integer("_sliding_window_pattern", default=6)
    )
    return read.layer_windows(layers, read.window(absent=4096), lambda index: (index + 1) % pattern != 0)


def _ropes(read: Reader) -> tuple[Rope, Rope]:
    """RoPE of the global and of the local layers: one set each, or (transformers 4) flat keys."""
    kinds = read.get("rope_parameters", {})
    if unknown := sorted(kinds.keys() - {FULL, SLIDING}):
        raise unsupported(f"rope_parameters.{unknown[0]}", kinds[unknown[0]], f"{FULL} and {SLIDING} are")
    if not all(isinstance(kind, Mapping) for kind in kinds.values()):
        raise ConfigError(f"config.json: rope_parameters = {kinds!r} should hold one object a layer type")
    scaling = {**(read.get("rope_scaling") or {}), **kinds.get(FULL, {})}
    return (
        parse_rope(scaling, read.number("rope_theta", default=1_000_000.0)),
        parse_rope(kinds.get(SLIDING, {}), read.number("rope_local_base_freq", default=10_000.0)),
    )
