"""Transformers small enough that the law of every short text can be enumerated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import decoder, eagle1, eagle3, llama, medusa
from jspec.types import Head, Heads, Model, Params

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


CONFIG = llama.Config(
    vocab_size=VOCAB, width=16, mlp_width=16, layers=1, heads=2, kv_heads=1, channels=8, max_length=64
)


@functools.cache
def tiny(seed: int, dtype: str = "float32") -> tuple[Model, Params]:
    """A one-layer transformer over five tokens; its law depends on the whole text."""
    model = llama.make(CONFIG, dtype=dtype)
    return model, random_params(llama.weights(CONFIG), seed, scale=0.5, dtype=dtype)


@functools.cache
def tiny_head(kind: str, dtype: str = "float32") -> tuple[Model, Params, Head | Heads, Params]:
    """The target of `tiny(0)` with the taps of a random head, and that head.

    ``kind``: "eagle"; "eagle3", which has a vocabulary of its own without one of the
    target's tokens; or "medusa", of three heads.
    """
    params = tiny(0, dtype)[1]
    head: Head | Heads
    if kind == "eagle":
        first = eagle1.Config(CONFIG)
        head = eagle1.make(first, dtype=dtype)
        own = random_params(eagle1.weights(first, ["layers.0"]), 1, dtype=dtype)
        own |= {"embed": params["embed"], "head": params["head"]}
    elif kind == "eagle3":
        third = eagle3.Config(CONFIG, draft_vocab=VOCAB - 1, taps=(0, 1), target_width=CONFIG.width)
        head = eagle3.make(third, dtype=dtype)
        own = random_params(eagle3.weights(third, ["midlayer"]), 1, dtype=dtype)
        own |= {"embed": params["embed"], "ids": jnp.array([0, 1, 3, 4], jnp.int32)}
    elif kind == "medusa":
        guesses = medusa.Config(CONFIG.width, VOCAB, heads=3, blocks=1)
        head = medusa.make(guesses)
        own = random_params(medusa.weights(guesses, "{i}.{j}.linear", "{i}.1"), 1, dtype=dtype)
    else:
        raise ValueError(f"kind = {kind!r} should be eagle, eagle3 or medusa")
    return decoder.make(CONFIG, taps=head.taps, dtype=dtype), params, head, own
