"""Threefry-2x32 in plain 32-bit operations: the words of `jax.random.bits` inside a kernel.

(Salmon et al.: Parallel random numbers: as easy as 1, 2, 3, SC 2011.) With jax's default,
``jax_threefry_partitionable``, entry i of an array of bits is the two halves of the block
at counter i, xored; so a kernel makes the words of any token id without the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt32

from jspec.sampling import keys

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def bits(
    key0: UInt32[Array, ""], key1: UInt32[Array, ""], counter: UInt32[Array, "*n"]
) -> UInt32[Array, "*n"]:
    """The words at so many places below 2**32 of what a key gives.

    >>> key, place = jnp.array([1, 2], jnp.uint32), jnp.arange(5, dtype=jnp.uint32)
    >>> bool(jnp.all(bits(*key, place) == jax.random.bits(keys.wrap(key), (5,))))
    True
    """
    schedule = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    low, high = counter + schedule[1], jnp.zeros_like(counter) + schedule[0]
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            high = high + low
            rotated = (low << jnp.uint32(turn)) | jax.lax.shift_right_logical(low, jnp.uint32(32 - turn))
            low = rotated ^ high
        high = high + schedule[(group + 1) % 3]
        low = low + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return high ^ low


def gumbel(
    key0: UInt32[Array, ""], key1: UInt32[Array, ""], token: Shaped[Array, "*n"], vocab: int
) -> Float[Array, "*n"]:
    """The entries of ``keys.gumbel(key, vocab)`` at token ids, int32 and below ``vocab`` or not.

    >>> key, token = jnp.array([1, 2], jnp.uint32), jnp.array([3, 0])
    >>> bool(jnp.allclose(gumbel(*key, token, 7), keys.gumbel(keys.wrap(key), 7)[token], rtol=1e-6))
    True
    """
    place = jax.lax.bitcast_convert_type(token, jnp.uint32)
    return keys.gumbel_of_bits(bits(key0, key1, place), bits(key0, key1, place + jnp.uint32(vocab)))
