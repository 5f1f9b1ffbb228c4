"""The KV cache: ragged rows, full or of a window, written as scratch and then committed.

Each row has its own ``length``. `write` puts T entries in the slots after it, `commit`
moves the length. Finished and short rows go on writing scratch entries, so the capacity
has to be ``slots >= prompt + new tokens + max(N, chunk)``: `capacity` computes it, and
every allocation goes through that. Writes are scatters that drop what does not fit;
`lax.dynamic_update_slice` would silently shift it back over real keys.

A layer with a sliding window of w positions is a ring (``wrap``): position p is in slot
p mod R. No map is kept, for a slot holds the newest position that falls on it. With
R >= w - 1 + scratch, scratch >= T, the T entries after ``length`` fall on positions that
not even their first row sees. So a refused draft costs nothing: what it overwrote is
out of every later window, and what it left behind is taken for the position R before,
which is out of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.errors import JspecError


class Entry(NamedTuple):
    """One layer's keys and values."""

    keys: Float[Array, "B K S C"]
    values: Float[Array, "B K S C"]


class Cache(NamedTuple):
    layers: tuple[Entry, ...]  # per-layer arrays, so that each is updated in place
    length: Int[Array, "B"]  # committed entries


def init(slots: Sequence[int], batch: int, kv_heads: int, head_dim: int, dtype) -> Cache:
    """An empty cache, of so many slots in each layer."""

    def empty(size: int) -> Array:
        return jnp.zeros((batch, kv_heads, size, head_dim), dtype)

    return Cache(tuple(Entry(empty(size), empty(size)) for size in slots), jnp.zeros((batch,), jnp.int32))


def ring_slots(slots: int, window: int | None, scratch: int | None) -> int:
    """Slots that a layer needs, of the ``slots`` that a text may take; None: no window, any pass.

    ``scratch``: the most rows that the passes of a round put after ``length``. `_put` writes two at least.

    >>> ring_slots(64, window=9, scratch=8), ring_slots(64, None, 8), ring_slots(64, 9, None)
    (16, 64, 64)
    """
    return slots if window is None or scratch is None else min(slots, window - 1 + max(scratch, 2))


def capacity(prompt_length: int, new_tokens: int, nodes: int, chunk: int, multiple: int = 64) -> int:
    """Slots that a row needs so that no write is clamped, rounded up to ``multiple``.

    >>> capacity(prompt_length=10, new_tokens=20, nodes=5, chunk=32)
    64
    """
    needed = prompt_length + new_tokens + max(nodes, chunk)
    return -(-needed // multiple) * multiple


def _put(
    buffer: Float[Array, "B K S C"], rows: Float[Array, "B T K C"], start: Int[Array, "B"], wrap: bool = False
) -> Float[Array, "B K S C"]:
    """Write T rows after each sequence's own start, in place.

    One row alone is written twice, the second time into the next scratch slot: XLA turns
    a scatter of a single update into a dynamic_update_slice, fuses that into each of its
    readers, and then has to copy the whole buffer for every one of them.
    """
    if rows.shape[1] == 1:
        rows = jnp.concatenate([rows, rows], axis=1)
    if wrap and rows.shape[1] > buffer.shape[2]:
        raise JspecError(f"a pass of {rows.shape[1]} rows does not fit a ring of {buffer.shape[2]} slots")
    slots = start[:, None] + jnp.arange(rows.shape[1])
    sequence = jnp.arange(rows.shape[0])[:, None]
    return buffer.at[sequence, :, slots % buffer.shape[2] if wrap else slots].set(
        rows.astype(buffer.dtype), mode="drop", unique_indices=True, indices_are_sorted=not wrap
    )


def hide_bad_values(
    keys: Float[Array, "B T K C"], values: Float[Array, "B T K C"], dtype: DTypeLike
) -> tuple[Float[Array, "B T K C"], Float[Array, "B T K C"]]:
    """Entries as they may stand in a cache of ``dtype``: a value that is not finite is 0, and its key NaN.

    A row that may not see a slot still multiplies its value, by a weight of 0, and 0 · NaN is NaN: one
    bad token on another branch, or in the padding of a prompt, would end a healthy row. A bad key is
    hidden by the mask; a row that does see it becomes NaN, as it has to.

    >>> keys, values = jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1, 2), 1e6)
    >>> [x.ravel().tolist() for x in hide_bad_values(keys, values, jnp.float16)]
    [[nan, nan], [0.0, 0.0]]
    """
    keys, values = keys.astype(dtype), values.astype(dtype)
    bad = jnp.any(~jnp.isfinite(values), axis=-1, keepdims=True)
    return jnp.where(bad, jnp.nan, keys), jnp.where(bad, 0, values)


def write(
    entry: Entry,
    keys: Float[Array, "B T K C"],
    values: Float[Array, "B T K C"],
    length: Int[Array, "B"],
    wrap: bool = False,
) -> Entry:
    """Put T scratch entries into the slots after ``length``. Raises `JspecError` for a smaller ring."""
    return Entry(_put(entry.keys, keys, length, wrap), _put(entry.values, values, length, wrap))


def write_windows(
    entry: Entry,
    keys: Float[Array, "B T K C"],
    values: Float[Array, "B T K C"],
    length: Int[Array, "B"],
    wrap: bool = False,
) -> Entry:
    """`write` for TPUs: one window a sequence, for which XLA keeps the cache laid out as kernels want it.

    A window that does not fit is dropped whole; with `capacity` all fit. Rings go to `write`.
    """
    if wrap:
        return write(entry, keys, values, length, wrap)
    window = jax.lax.ScatterDimensionNumbers((0, 1, 2), (), (1,))

    def put(buffer: Array, rows: Array, start: Array) -> Array:
        return jax.lax.scatter(
            buffer,
            start[None],
            rows.swapaxes(0, 1).astype(buffer.dtype),
            window,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
        )

    return Entry(*(jax.vmap(put)(b, r, length) for b, r in zip(entry, (keys, values), strict=True)))


def compact(
    layers: tuple[Entry, ...], path: Int[Array, "B P"], length: Int[Array, "B"], wraps: Sequence[bool] = ()
) -> tuple[Entry, ...]:
    """Move the scratch entries of the nodes ``path`` to the slots after ``length``, in its order.

    ``wraps``: which layers are rings (default: none). What is beyond the accepted nodes of
    a path may come out as anything: those slots stay scratch. `jspec.pallas` has kernels
    with this signature.
    """
    slots = length[:, None] + path

    def move(buffer: Array, wrap: bool) -> Array:
        index = slots % buffer.shape[2] if wrap else slots
        kept = jnp.take_along_axis(buffer, index[:, None, :, None], axis=2)
        return _put(buffer, kept.swapaxes(1, 2), length, wrap)

    rings = wraps or [False] * len(layers)
    return tuple(
        Entry(move(e.keys, wrap), move(e.values, wrap)) for e, wrap in zip(layers, rings, strict=True)
    )


def commit(
    cache: Cache,
    path: Int[Array, "B P"] | None,
    count: Int[Array, "B"],
    wraps: Sequence[bool] = (),
    compact: Callable[..., tuple[Entry, ...]] = compact,
) -> Cache:
    """Keep the first ``count`` nodes of ``path``; ``None`` is a chain, a length bump.

    A gather along a constant path would make XLA copy every cache each round, hence
    the static ``None``. ``wraps``: which layers are rings (default: none).
    """
    layers = cache.layers if path is None else compact(cache.layers, path, cache.length, wraps)
    return Cache(layers, cache.length + count)
