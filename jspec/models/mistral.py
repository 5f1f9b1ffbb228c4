"""The Mistral family (arXiv 2310.06825): Llama with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models import llama
from jspec.models.config import Reader
from jspec.models.decoder import Config, make, shapes, weights
from jspec.models.rope import read_ropes

__all__ = ["DEFAULTS", "Config", "from_hf", "make", "weights"]

DEFAULTS: Mapping[str, Any] = {
    **llama.DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""As in `jspec.models.llama`."""


def from_hf(config: Mapping[str, Any], place: str = "") -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: mistral``.

    ``sliding_window: null`` means none (Mistral 7B from v0.2 on); a missing key means
    4096, as in transformers. Raises `ConfigError`, naming the key.
    """
    read = Reader(config, place)
    read.require("hidden_act", "silu")
    sizes, window = shapes(read, DEFAULTS), read.window(absent=4096)
    windows = () if window is None else (window,) * sizes["layers"]
    result = Config(**sizes | read_ropes(read, sizes, windows), windows=windows)
    read.done()
    return result
