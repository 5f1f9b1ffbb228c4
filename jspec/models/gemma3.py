"""The Gemma 3 family, text only (arXiv 2503.19786).

Local layers see a window and rotate by a small base, global ones see everything; norms
stand before and after attention and MLP, and on each head of q and k; the embedding is
multiplied by sqrt(D) and is the head too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models.config import Reader
from jspec.models.decoder import Config, make, shapes, weights
from jspec.models.layers import gelu_tanh, rms_norm_around_one
from jspec.models.rope import read_ropes

__all__ = ["DEFAULTS", "Config", "from_hf", "make", "weights"]

DEFAULTS: Mapping[str, Any] = dict(
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
"""As in `jspec.models.llama`."""


def from_hf(config: Mapping[str, Any], place: str = "") -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: gemma3_text``.

    The score cap is applied where the config has one, although transformers 5 reads
    it and leaves it out. Raises `ConfigError`, naming the key, for a missing or
    malformed value and for one that asks for maths this family does not have.
    """
    read = Reader(config, place)
    read.require("hidden_activation", "gelu_pytorch_tanh")
    read.require("use_bidirectional_attention", False)
    sizes, bias = shapes(read, DEFAULTS), read.flag("attention_bias")
    windows = _windows(read, sizes["layers"])
    result = Config(
        **sizes | read_ropes(read, sizes, windows, theta=1_000_000.0, window_theta=10_000.0),
        windows=windows,
        attention_bias=bias,
        output_bias=bias,
        head_norms=True,
        post_norms=True,
        scale=read.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        embed_scale=sizes["hidden_size"] ** 0.5,
        attention_softcap=read.optional_number("attn_logit_softcapping"),
        final_softcap=read.optional_number("final_logit_softcapping"),
        activation=gelu_tanh,
        norm=rms_norm_around_one,
    )
    read.done()
    return result


def _windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """By ``layer_types``, or every layer local but each ``sliding_window_pattern``-th."""
    older = read.integer("_sliding_window_pattern", default=6)
    pattern = read.integer("sliding_window_pattern", default=older)
    return read.layer_windows(layers, read.window(absent=4096), lambda index: (index + 1) % pattern != 0)
