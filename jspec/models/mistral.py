"""The Mistral family (arXiv 2310.06825): Llama with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models.config import Reader
from jspec.models.decoder import Config, make, shapes, weights

__all__ = ["Config", "from_hf", "make", "weights"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: mistral``.

    ``sliding_window: null`` means none (Mistral 7B from v0.2 on); a missing key means
    4096, as in transformers. Raises `ConfigError`, naming the key.
    """
    read = Reader(config)
    read.require("hidden_act", "silu")
    sizes = shapes(read, max_position_embeddings=131072)
    window = read.window(absent=4096)
    result = Config(**sizes, rope=read.rope(), windows=() if window is None else (window,) * sizes["layers"])
    read.done()
    return result
