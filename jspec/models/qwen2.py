"""The Qwen2 and Qwen2.5 families (arXiv 2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models.config import Reader
from jspec.models.decoder import Config, make, shapes, weights

__all__ = ["Config", "from_hf", "make", "upper_windows", "weights"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: qwen2``.

    Raises `ConfigError`, naming the key, for a missing or malformed value and for one
    that asks for maths this family does not have.
    """
    read = Reader(config)
    read.require("hidden_act", "silu")
    sizes = shapes(read, max_position_embeddings=32768)
    result = Config(
        **sizes, rope=read.rope(), windows=upper_windows(read, sizes["layers"]), attention_bias=True
    )
    read.done()
    return result


def upper_windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """Windows of the layers from ``max_window_layers`` on, where ``use_sliding_window`` is set."""
    window, first = read.window(absent=4096), read.integer("max_window_layers", default=28, least=0)
    if not read.flag("use_sliding_window"):
        window = None
    return read.layer_windows(layers, window, lambda index: window is not None and index >= first)
