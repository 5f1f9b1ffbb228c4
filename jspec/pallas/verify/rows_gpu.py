"""Rows of logits as the GPU kernels take them: pieces of 128 ids or a multiple of it, where they lie."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jspec.errors import JspecError

LANES = 128
"""Threads of a warpgroup, the least that one can take of a row."""

COUNTED = 1 << 24  # float32 counts no further


def check(x: Array, name: str) -> None:
    """Raise JspecError for rows that the kernels cannot take."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise JspecError(f"the GPU kernels take {name} in float32 or bfloat16, not {x.dtype}")
    if x.shape[-1] >= COUNTED:
        raise JspecError(f"the GPU kernels take less than {COUNTED} ids, not {x.shape[-1]}")


def widen(x: Float[Array, "B N V"]) -> Float[Array, "B N W"]:
    """Rows of 128 ids at least: only a vocabulary of fewer is copied."""
    missing = max(LANES - x.shape[-1], 0)
    return jnp.pad(x, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf) if missing else x


def slices(x: Array, span: int) -> int:
    """How many ids a warpgroup takes at once: ``span``, or less in a small vocabulary.

    A thread loads up to 8 bytes at once, which must be aligned. Where rows do not begin at
    multiples of 8 bytes the number is an odd multiple of 128, for which it loads single ids.
    """
    if span < LANES or span % LANES:
        raise JspecError(f"span is {span}; it must be a multiple of {LANES}")
    vocab = x.shape[-1]
    parts = min(span, vocab) // LANES
    if vocab * x.dtype.itemsize % 8:
        parts -= 1 - parts % 2
    return parts * LANES


def window(vocab: int, span: int, index: Array) -> tuple[Array, Array, Array]:
    """Where a slice of the row lies: the first id that is read, all of them, and which are its own.

    The last slice begins early rather than ends outside; what it shares is its neighbour's.
    """
    begin = index * span
    start = jnp.minimum(begin, vocab - span)
    ids = lax.broadcasted_iota(jnp.int32, (span,), 0) + start
    return start, ids, ids >= begin
