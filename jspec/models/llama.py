"""The Llama family (arXiv 2302.13971, 2407.21783): the shared decoder with nothing added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.models.config import Reader
from jspec.models.decoder import FINAL, Config, make, shapes, weights
from jspec.models.rope import read_ropes

__all__ = ["DEFAULTS", "FINAL", "Config", "from_hf", "make", "weights"]

DEFAULTS: Mapping[str, Any] = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
)
"""What transformers takes for a missing key, which a config.json inside another leaves out."""


def from_hf(config: Mapping[str, Any], place: str = "") -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: llama``.

    ``place``: where the config stands in its file, as `Reader` has it. Raises `ConfigError`,
    naming the key, for a missing or malformed value and for one that asks for maths this
    family does not have.
    """
    read = Reader(config, place)
    read.require("hidden_act", "silu")
    read.require("pretraining_tp", 1)
    sizes, bias = shapes(read, DEFAULTS), read.flag("attention_bias")
    result = Config(
        **sizes | read_ropes(read, sizes),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=read.flag("mlp_bias"),
    )
    read.done()
    return result
