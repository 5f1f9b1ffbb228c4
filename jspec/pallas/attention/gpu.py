"""Verification attention on Hopper GPUs, in Mosaic GPU: flash decoding with tensor cores.

Grid: (splits, K x tiles, B), one warpgroup each. A tile is up to 64 query rows that share
a kv head, row ``t * G + g``: the M of one wgmma. A split is a run of a row's visible
blocks of ``block`` slots; K and V of each go once from global to shared memory, the next
`STAGES` ahead by TMA. Per block: scores = Q Kᵀ (wgmma), online softmax in registers,
weights to shared memory in bfloat16, then weights V (wgmma). The float32 sums of each
split, its maximum and its total are written out and merged in jnp by log-sum-exp.

Blocks that all rows see whole, which in a long cache is nearly all, take no mask. In the
others scores get one, and values that no row sees are set to 0 in shared memory first:
a stale NaN would pass through 0 * NaN. A tree comes as two words of bits a row.

Static: all shapes, T, R, splits, block, window and the soft cap. Traced: lengths, masks
and depths, and with them how many blocks a program copies, which may be none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.attention.gpu_body import SMEM_BYTES, TILE, Facts, Shape, kernel, scratch
from jspec.pallas.attention.reference import MAX_NODES, pack

__all__ = ["attend_gpu", "bytes_moved"]

HEAD_DIMS = (64, 128)
MULTIPROCESSORS = 132


def attend_gpu(
    query: Float[Array, "B T H C"],
    keys: Float[Array, "B K S C"],
    values: Float[Array, "B K S C"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B T R"] | None,
    scale: float,
    *,
    window: int | None = None,
    depth: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    interpret: Any = False,
    splits: int | None = None,
    block: int = 64,
) -> Float[Array, "B T H C"]:
    """`jspec.models.layers.attend` on a Hopper GPU, for a bfloat16 cache and query.

    C is 64 or 128; a tree has at most 64 scratch rows, a chain any number; a cache longer
    than a block has a multiple of 8 slots. ``splits``: programs that share a kv head's cache
    (default: as many as fill the chip). ``block``: slots in a copy, a multiple of 64.
    ``interpret``: False or `compat.gpu_interpreter()`.
    Raises `JspecError` for what it cannot take.
    """
    shape = _shape(query, keys, values, mask, window, splits, block)
    infos, facts = _describe(shape, length, mask, depth)
    if shape.slots < block:
        missing = ((0, 0), (0, 0), (0, block - shape.slots), (0, 0))
        keys, values = jnp.pad(keys, missing), jnp.pad(values, missing)
    programs = (shape.batch, shape.kv_heads * shape.tiles, shape.splits)
    run = compat.gpu_kernel(
        partial(kernel, shape, scale, softcap, interpret),
        out_type=(
            jax.ShapeDtypeStruct((*programs, shape.kept, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*programs, 2, TILE), jnp.float32),
        ),
        grid=programs[::-1],
        grid_names=("split", "tile", "row"),
        scratch_types=[*scratch(shape)],
        interpret=interpret,
    )
    sums, stats = run(_to_tiles(shape, query), keys, values, infos, facts)
    return _merge(shape, sums, stats[..., : shape.kept]).astype(values.dtype)


def bytes_moved(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    slots: int,
    lengths: Sequence[int],
    scratch: int | None = None,
    window: int | None = None,
    splits: int | None = None,
    block: int = 64,
) -> int:
    """Bytes that the kernel's copies move, both ways, for a query of this shape [B, T, H, C].

    ``scratch``: R of a tree; None: a chain. Llama 3 8B at 8k tokens, eight rows against one:

    >>> one, eight = (bytes_moved((1, rows, 32, 128), 8, 8320, [8192]) for rows in (1, 8))
    >>> one, eight
    (34701312, 37060608)
    """
    batch, rows, heads, head_dim = shape
    plan = _plan(batch, rows, heads, head_dim, kv_heads, slots, scratch, window, splits, block)
    shallow = jnp.full((batch,), -(window or 0))
    _, count = _span(plan, jnp.asarray(lengths), shallow)
    blocks = int(jnp.sum(count)) * kv_heads * plan.tiles
    programs = batch * kv_heads * plan.tiles * plan.splits
    query = plan.kept * head_dim * 2 + plan.words * TILE * 4
    result = plan.kept * head_dim * 4 + 2 * TILE * 4
    return blocks * block * head_dim * 2 * 2 + programs * (query + result)


def _plan(
    batch: int,
    rows: int,
    heads: int,
    head_dim: int,
    kv_heads: int,
    slots: int,
    scratch: int | None,
    window: int | None,
    splits: int | None,
    block: int,
) -> Shape:
    """The static side of a call, checked against what the kernel can take."""
    if heads % kv_heads:
        raise JspecError(f"attention on GPU: {heads} query heads are no multiple of {kv_heads} kv heads")
    if head_dim not in HEAD_DIMS:
        raise JspecError(f"attention on GPU takes a head_dim of 64 or 128, not {head_dim}")
    if scratch is not None and not rows <= scratch <= MAX_NODES:
        raise JspecError(f"attention on GPU takes trees of {rows} (T) to {MAX_NODES} nodes, not {scratch}")
    if slots > block and slots % 8:
        raise JspecError(f"attention on GPU takes caches of a multiple of 8 slots, not {slots}")
    if window is not None and scratch not in (None, rows):
        raise JspecError("a layer with a window takes its scratch rows in one pass")
    if splits is not None and splits < 1:
        raise JspecError(f"attention on GPU needs at least 1 split, not {splits}")
    tree = scratch is not None
    shape = Shape(
        batch, rows, scratch or rows, kv_heads, heads // kv_heads, slots, head_dim, tree, window, block, 1
    )
    if block % 64 or not 0 < block <= 256 or shape.stages < 2:
        raise JspecError(
            f"attention on GPU takes blocks of 64, 128, ... 256 slots, of which two fit {SMEM_BYTES} bytes "
            f"of shared memory, not {block} slots at head_dim {head_dim}"
        )
    fill = MULTIPROCESSORS // (batch * kv_heads * shape.tiles)
    return shape._replace(splits=splits or max(1, min(shape.blocks, fill)))


def _shape(
    query: Array,
    keys: Array,
    values: Array,
    mask: Array | None,
    window: int | None,
    splits: int | None,
    block: int,
) -> Shape:
    for name, array in (("query", query), ("cache", keys), ("cache", values)):
        if array.dtype != jnp.bfloat16:
            raise JspecError(f"attention on GPU takes a bfloat16 {name}, not {array.dtype}")
    batch, rows, heads, head_dim = query.shape
    scratch = None if mask is None else mask.shape[2]
    return _plan(batch, rows, heads, head_dim, keys.shape[1], keys.shape[2], scratch, window, splits, block)


def _span(shape: Shape, length: Array, oldest: Array) -> tuple[Array, Array]:
    """The first block with a slot that some row sees, and how many there are."""
    newest = length + shape.scratch - 1
    if shape.window is None:
        last = jnp.minimum(newest, shape.slots - 1)
        return jnp.zeros_like(length), last // shape.block + 1
    # Positions oldest ... newest, of which a ring holds the last S.
    since = jnp.maximum(jnp.maximum(length + oldest + 1, 0), newest - shape.slots + 1)
    start, end = since % shape.slots, newest % shape.slots
    first, last = start // shape.block, end // shape.block
    around = jnp.minimum(shape.blocks - first + last + 1, shape.blocks)
    return first, jnp.where(start <= end, last - first + 1, around)


def _describe(
    shape: Shape, length: Array, mask: Array | None, depth: Array | None
) -> tuple[Int[Array, "B tiles words 64"], Int[Array, "B 8"]]:
    """What each query row sees, and the `Facts` of each sequence."""
    row = jnp.broadcast_to(jnp.arange(shape.rows, dtype=jnp.int32), (shape.batch, shape.rows))
    depth = row if depth is None else depth.astype(jnp.int32)
    oldest = depth - (shape.window or 0)
    if mask is None:
        words, seen_low, seen_high = [row], row[:, -1], row[:, -1]
    else:
        if shape.window is not None:
            mask &= depth[:, :, None] - depth[:, None, :] < shape.window
        bits = lax.bitcast_convert_type(pack(mask), jnp.int32)
        words = [bits[..., 0], bits[..., 1]]
        some = lax.bitcast_convert_type(pack(jnp.any(mask, axis=1, keepdims=True)), jnp.int32)
        seen_low, seen_high = some[:, 0, 0], some[:, 0, 1]
    if shape.window is not None:
        words.append(oldest)
    infos = jnp.repeat(jnp.stack(words, axis=2), shape.group, axis=1)
    infos = jnp.pad(infos, ((0, 0), (0, shape.tiles * TILE - infos.shape[1]), (0, 0)))
    infos = infos.reshape(shape.batch, shape.tiles, TILE, shape.words).swapaxes(2, 3)
    length, lowest = length.astype(jnp.int32), jnp.min(oldest, axis=1)
    newest = (length + shape.scratch - 1) % shape.slots
    first, count = _span(shape, length, lowest)
    facts = Facts(first, count, length, newest, seen_low, seen_high, lowest, jnp.max(oldest, axis=1))
    return infos, jnp.stack(facts, axis=1).astype(jnp.int32)


def _to_tiles(shape: Shape, query: Array) -> Float[Array, "B programs rows C"]:
    """Query rows by kv head, in tiles; rows that fill up the last tile are 0."""
    grouped = query.reshape(shape.batch, shape.rows, shape.kv_heads, shape.group, shape.head_dim)
    count = shape.rows * shape.group
    tiles = grouped.swapaxes(1, 2).reshape(shape.batch, shape.kv_heads, count, shape.head_dim)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, shape.tiles * shape.kept - count), (0, 0)))
    return tiles.reshape(shape.batch, shape.kv_heads * shape.tiles, shape.kept, shape.head_dim)


def _merge(shape: Shape, sums: Array, stats: Array) -> Float[Array, "B T H C"]:
    """The splits' weighted sums, maxima (base 2) and totals made one."""
    top, total = stats[..., 0, :], stats[..., 1, :]
    weight = jnp.exp2(top - jnp.max(top, axis=2, keepdims=True))
    mixed = jnp.sum(weight[..., None] * sums, axis=2) / jnp.sum(weight * total, axis=2)[..., None]
    count = shape.rows * shape.group
    mixed = mixed.reshape(shape.batch, shape.kv_heads, shape.tiles * shape.kept, -1)[:, :, :count]
    mixed = mixed.reshape(shape.batch, shape.kv_heads, shape.rows, shape.group, shape.head_dim)
    return mixed.swapaxes(1, 2).reshape(shape.batch, shape.rows, -1, shape.head_dim)
