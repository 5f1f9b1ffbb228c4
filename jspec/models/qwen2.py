"""The Qwen2 and Qwen2.5 families (arXiv 2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models import llama
from jspec.models.config import Reader
from jspec.models.decoder import Config, make, shapes, weights
from jspec.models.rope import read_ropes

__all__ = ["DEFAULTS", "Config", "from_hf", "make", "upper_windows", "weights"]

DEFAULTS: Mapping[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
"""As in `jspec.models.llama`."""


def from_hf(config: Mapping[str, Any], place: str = "") -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: qwen2``.

    Raises `ConfigError`, naming the key, for a missing or malformed value and for one
    that asks for maths this family does not have.
    """
    read = Reader(config, place)
    read.require("hidden_act", "silu")
    sizes = shapes(read, DEFAULTS)
    windows = upper_windows(read, sizes["layers"])
    result = Config(**sizes | read_ropes(read, sizes, windows), windows=windows, attention_bias=True)
    read.done()
    return result


def upper_windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """Windows of the layers from ``max_window_layers`` on, where ``use_sliding_window`` is set."""
    window, first = read.window(absent=4096), read.integer("max_window_layers", default=28, least=0)
    if not read.flag("use_sliding_window"):
        window = None
    return read.layer_windows(layers, window, lambda index: window is not None and index >= first)
