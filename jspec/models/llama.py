"""The Llama family (arXiv 2302.13971, 2407.21783): the shared decoder with nothing added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models.config import Reader
from jspec.models.decoder import FINAL, Config, make, shapes, weights

__all__ = ["FINAL", "Config", "from_hf", "make", "weights"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: llama``.

    Raises `ConfigError`, naming the key, for a missing or malformed value and for one
    that asks for maths this family does not have.
    """
    read = Reader(config)
    read.require("hidden_act", "silu")
    read.require("pretraining_tp", 1)
    bias = read.flag("attention_bias")
    result = Config(
        **shapes(read, max_position_embeddings=2048),
        rope=read.rope(),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=read.flag("mlp_bias"),
    )
    read.done()
    return result
