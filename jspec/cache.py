"""The KV cache: full attention, ragged rows, written as scratch and then committed.

Each row has its own ``length``. `write` puts T entries in the slots after it, `commit`
moves the length. Finished and short rows go on writing scratch entries, so the capacity
has to be ``slots >= prompt + new tokens + max(N, chunk)``: `capacity` computes it, and
every allocation goes through that. Writes are scatters that drop what does not fit;
`lax.dynamic_update_slice` would silently shift it back over real keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Entry(NamedTuple):
    """One layer's keys and values."""

    keys: Float[Array, "B K S C"]
    values: Float[Array, "B K S C"]


class Cache(NamedTuple):
    layers: tuple[Entry, ...]  # per-layer arrays, so that each is updated in place
    length: Int[Array, "B"]  # committed entries


def init(layers: int, batch: int, kv_heads: int, slots: int, channels: int, dtype) -> Cache:
    """An empty cache."""
    shape = (batch, kv_heads, slots, channels)
    entries = tuple(Entry(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))
    return Cache(entries, jnp.zeros((batch,), jnp.int32))


def capacity(prompt_length: int, new_tokens: int, nodes: int, chunk: int, multiple: int = 64) -> int:
    """Slots that a row needs so that no write is clamped, rounded up to ``multiple``.

    >>> capacity(prompt_length=10, new_tokens=20, nodes=5, chunk=32)
    64
    """
    needed = prompt_length + new_tokens + max(nodes, chunk)
    return -(-needed // multiple) * multiple


def _put(buffer: Float[Array, "B K S C"], rows: Float[Array, "B T K C"], start: Int[Array, "B"]):
    """Write T rows after each sequence's own start, in place.

    One row alone is written twice, the second time into the next scratch slot: XLA turns
    a scatter of a single update into a dynamic_update_slice, fuses that into each of its
    readers, and then has to copy the whole buffer for every one of them.
    """
    if rows.shape[1] == 1:
        rows = jnp.concatenate([rows, rows], axis=1)
    slots = start[:, None] + jnp.arange(rows.shape[1])
    sequence = jnp.arange(rows.shape[0])[:, None]
    return buffer.at[sequence, :, slots].set(
        rows.astype(buffer.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )


def write(
    entry: Entry, keys: Float[Array, "B T K C"], values: Float[Array, "B T K C"], length: Int[Array, "B"]
) -> Entry:
    """Put T scratch entries into the slots after ``length``."""
    return Entry(_put(entry.keys, keys, length), _put(entry.values, values, length))


def commit(cache: Cache, path: Int[Array, "B P"] | None, count: Int[Array, "B"]) -> Cache:
    """Keep the first ``count`` nodes of ``path``; ``None`` is a chain, a length bump.

    A gather along a constant path would make XLA copy every cache each round, hence
    the static ``None``.
    """
    if path is None:
        return cache._replace(length=cache.length + count)
    slots = cache.length[:, None] + path

    def compact(buffer):
        kept = jnp.take_along_axis(buffer, slots[:, None, :, None], axis=2)
        return _put(buffer, kept.swapaxes(1, 2), cache.length)

    layers = tuple(Entry(compact(e.keys), compact(e.values)) for e in cache.layers)
    return Cache(layers, cache.length + count)
