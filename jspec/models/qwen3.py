"""The dense Qwen3 family (arXiv 2505.09388): Llama with a norm on each head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models import qwen2
from jspec.models.config import Reader
from jspec.models.decoder import Config, make, shapes, weights
from jspec.models.rope import read_ropes

__all__ = ["DEFAULTS", "Config", "from_hf", "make", "weights"]

DEFAULTS: Mapping[str, Any] = {**qwen2.DEFAULTS, "head_dim": 128}
"""As in `jspec.models.llama`."""


def from_hf(config: Mapping[str, Any], place: str = "") -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: qwen3``.

    Raises `ConfigError`, naming the key, for a missing or malformed value and for one
    that asks for maths this family does not have.
    """
    read = Reader(config, place)
    read.require("hidden_act", "silu")
    sizes, bias = shapes(read, DEFAULTS), read.flag("attention_bias")
    windows = qwen2.upper_windows(read, sizes["layers"])
    result = Config(
        **sizes | read_ropes(read, sizes, windows),
        windows=windows,
        attention_bias=bias,
        output_bias=bias,
        head_norms=True,
    )
    read.done()
    return result
