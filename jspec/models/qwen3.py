"""The dense Qwen3 family (arXiv 2505.09388): Llama with a norm on each head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models.config import Reader
from jspec.models.decoder import Config, make, shapes, weights
from jspec.models.qwen2 import upper_windows

__all__ = ["Config", "from_hf", "make", "weights"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: qwen3``.

    Raises `ConfigError`, naming the key, for a missing or malformed value and for one
    that asks for maths this family does not have.
    """
    read = Reader(config)
    read.require("hidden_act", "silu")
    sizes, bias = shapes(read, head_dim=128, max_position_embeddings=32768), read.flag("attention_bias")
    result = Config(
        **sizes,
        rope=read.rope(),
        windows=upper_windows(read, sizes["layers"]),
        attention_bias=bias,
        output_bias=bias,
        head_norms=True,
    )
    read.done()
    return result
