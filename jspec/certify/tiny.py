"""Transformers small enough that the distribution of every short text can be enumerated."""

from __future__ import annotations

import functools

from jspec.models import decoder, llama
from jspec.models.heads import Head, Heads
from jspec.models.layers import random_params
from jspec.types import Model, Params
from jspec.weights.heads.base import HeadKind

VOCAB = 5


CONFIG = llama.Config(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    context_length=64,
)


@functools.cache
def tiny(seed: int, dtype: str = "float32") -> tuple[Model, Params]:
    """A one-layer transformer over five tokens; its distribution depends on the whole text."""
    model = llama.make(CONFIG, dtype=dtype)
    return model, random_params(llama.weights(CONFIG), seed, scale=0.5, dtype=dtype)


@functools.cache
def tiny_head(kind: HeadKind, dtype: str = "float32") -> tuple[Model, Params, Head | Heads, Params]:
    """The target of `tiny(0)` with the feature layers of a random head, and that head."""
    params = tiny(0, dtype)[1]
    head, own = kind.random(CONFIG, params, dtype)
    return decoder.make(CONFIG, feature_layers=head.feature_layers, dtype=dtype), params, head, own
