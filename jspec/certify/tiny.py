"""Transformers small enough that the law of every short text can be enumerated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import llama
from jspec.types import Model, Params

VOCAB = 5


def random_params(weights: Any, seed: int = 0, scale: float = 0.4, dtype: Any = jnp.float32) -> Params:
    """Random params with the structure and the shapes of a weight description.

    Norm weights (all vectors) are around 1.
    """
    leaves, structure = jax.tree.flatten(weights)
    rng = np.random.default_rng(seed)
    arrays = [
        jnp.asarray(scale * rng.standard_normal(leaf.shape) + (len(leaf.shape) == 1), dtype)
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, arrays)


@functools.cache
def tiny(seed: int, dtype: str = "float32") -> tuple[Model, Params]:
    """A one-layer transformer over five tokens; its law depends on the whole text."""
    config = llama.Config(
        vocab_size=VOCAB, width=16, mlp_width=16, layers=1, heads=2, kv_heads=1, channels=8, max_length=64
    )
    model = llama.make(config, dtype=dtype)
    return model, random_params(llama.weights(config), seed, scale=0.5, dtype=dtype)
