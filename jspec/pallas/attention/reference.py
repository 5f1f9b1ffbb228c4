"""Verification attention: what its TPU and its GPU form share, and their reference.

N rows of a sequence (a chain or a tree, the root first) look at all its committed slots
and at those of its own last R scratch rows that the tree allows. All N x G query rows that
share a kv head are one tile, so each key and value is read once for all of them; slots
beyond ``length + R`` are not read at all. A tree comes as bits, 8 bytes a node.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from jspec.models.layers import attend as attend_ref

__all__ = ["MAX_NODES", "attend_ref", "pack"]

MAX_NODES = 64
"""Scratch rows that the two words of a node can tell apart."""


def pack(mask: Bool[Array, "B T R"]) -> UInt32[Array, "B T 2"]:
    """The nodes that each row may look at, as bits: node j is bit j % 32 of word j // 32.

    >>> pack(jnp.array([[[True, False, True]]])).tolist()
    [[[5, 0]]]
    """
    nodes = mask.shape[2]
    padded = jnp.pad(mask, ((0, 0), (0, 0), (0, MAX_NODES - nodes))).astype(jnp.uint32)
    words = padded.reshape(*mask.shape[:2], 2, 32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(words, axis=-1, dtype=jnp.uint32)
