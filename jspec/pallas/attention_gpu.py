"""Verification attention on Hopper GPUs (Mosaic GPU)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from jspec.errors import JspecError
from jspec.models.layers import soft_cap
from jspec.pallas import compat
from jspec.pallas.attention import MAX_NODES, pack

TILE = 64
SMS = 132
STAGES = 4
LOW = -1e30


class Shape(NamedTuple):
    batch: int
    rows: int
    scratch: int
    heads: int
    kv_heads: int
    slots: int  # of the ring, where it is one
    channels: int
    tree: bool
    window: int | None
    softcap: float | None
    scale: float
    block: int
    splits: int

    @property
    def group(self):
        return self.heads // self.kv_heads

    @property
    def tiles(self):
        return -(-self.rows * self.group // TILE)

    @property
    def kept(self):
        return min(TILE, -(-self.rows * self.group // 8) * 8)

    @property
    def blocks(self):
        return -(-self.slots // self.block)


FIRST, COUNT, LENGTH, TOP, SEEN0, SEEN1, LOW_MIN, LOW_MAX = range(8)


def spans(length, rows, scratch, slots, window, block):
    newest = length + scratch - 1
    blocks = -(-slots // block)
    if window is None:
        last = jnp.minimum(newest, slots - 1)
        return jnp.zeros_like(length), last // block + 1
    oldest = jnp.maximum(jnp.maximum(length - window + 1, 0), newest - slots + 1)
    first, last = oldest % slots, newest % slots
    straight = last // block - first // block + 1
    wrapped = jnp.minimum(blocks - first // block + last // block + 1, blocks)
    return first // block, jnp.where(first <= last, straight, wrapped)


def visible(shape: Shape, slot, start, fact, words, low):
    node = slot - fact(LENGTH)
    if shape.window is not None:
        # top: newest position; a slot holds the newest position that falls on it
        newest = lax.rem(fact(TOP), shape.slots)
        node = jnp.where(slot <= newest, node + (fact(TOP) - newest), node + (fact(TOP) - newest - shape.slots))
        near = (node > low) & (node + fact(LENGTH) >= 0)
    if shape.tree:
        word = jnp.where(node < 32, words[0], words[1])
        bit = lax.shift_right_logical(word, node & 31) & 1
        seen = (node >= 0) & (node < shape.scratch) & (bit == 1)
        committed = node < 0
        seen = seen | (committed if shape.window is None else committed & near)
    else:
        seen = node <= words[0]
        if shape.window is not None:
            seen = seen & near
    if shape.slots % shape.block:
        seen = seen & (slot >= start) & (slot < shape.slots)
    return seen


def kernel(shape: Shape, interpret, query, keys, values, infos, facts, out, stats, q_smem, k_smem, v_smem, p_smem, info_smem, out_smem, stat_smem, q_bar, k_bar, v_bar):
    block, channels = shape.block, shape.channels
    split, tile, row = (lax.axis_index(n) for n in ("split", "tile", "row"))
    head = tile // shape.tiles if shape.tiles > 1 else tile
    part = tile % shape.tiles if shape.tiles > 1 else 0
    fact = lambda index: facts[row, index]
    each = (fact(COUNT) + shape.splits - 1) // shape.splits
    begin = split * each
    steps = jnp.clip(fact(COUNT) - begin, 0, each)
    words = infos.shape[2]

    plgpu.copy_gmem_to_smem(query.at[row, tile], q_smem, q_bar.at[0])
    plgpu.copy_gmem_to_smem(infos.at[row, part], info_smem, q_bar.at[1])

    def begins(step):
        index = fact(FIRST) + begin + step
        index = jnp.where(index >= shape.blocks, index - shape.blocks, index)
        start = index * block
        return start, jnp.minimum(start, keys.shape[2] - block)

    def fetch(step, slot):
        _, start = begins(step)
        at = (row, head, pl.ds(start, block))
        plgpu.copy_gmem_to_smem(keys.at[at], k_smem.at[slot], k_bar.at[slot])
        plgpu.copy_gmem_to_smem(values.at[at], v_smem.at[slot], v_bar.at[slot])

    for stage in range(STAGES):
        pl.when(stage < steps)(partial(fetch, stage, stage))
    plgpu.barrier_wait(q_bar.at[0])
    plgpu.barrier_wait(q_bar.at[1])

    def body(step, carry):
        acc, top, total = carry
        slot = lax.rem(step, STAGES)
        nominal, start = begins(step)
        plgpu.barrier_wait(k_bar.at[slot])

        def product(ref):
            plgpu.wgmma(ref, q_smem, k_smem.at[slot].T)
            return ref[...]

        if interpret and not compat.INTERPRETS_TRANSPOSED:
            scores = lax.dot_general(q_smem[...], k_smem[slot], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        else:
            scores = pl.run_scoped(product, plgpu.ACC((TILE, block), jnp.float32))
        scores = scores * shape.scale
        if shape.softcap is not None:
            scores = soft_cap(scores, shape.softcap)
        scores = scores * math.log2(math.e)

        spread = lambda v: lax.broadcast_in_dim(v, (TILE, block), [0])
        hint = (lambda x, layout: x) if interpret else plgpu.layout_cast
        at = hint(lax.broadcasted_iota(jnp.int32, (TILE, block), 1), plgpu.Layout.WGMMA) + start
        seen = visible(shape, at, nominal, fact, [spread(info_smem[0]), spread(info_smem[1])] if shape.tree else [spread(info_smem[0])], spread(info_smem[words - 1]) if shape.window is not None else None)
        scores = jnp.where(seen, scores, -jnp.inf)

        above = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - above)
        weights = jnp.exp2(scores - spread(above))
        total = total * shrink + jnp.sum(weights, axis=1)
        p_smem[...] = weights.astype(p_smem.dtype)
        plgpu.barrier_wait(v_bar.at[slot])

        @pl.when(start + block > fact(LENGTH))
        def _():
            at = hint(lax.broadcasted_iota(jnp.int32, (block, channels), 0), plgpu.Layout.WGMMA) + start
            seen = visible(shape, at, nominal, fact, [fact(SEEN0), fact(SEEN1)], fact(LOW_MIN))
            v_smem[slot] = jnp.where(seen, v_smem[slot], jnp.zeros((), v_smem.dtype))

        plgpu.commit_smem()

        def mix(ref):
            plgpu.wgmma(ref, p_smem, v_smem.at[slot])
            return ref[...]

        mixed = pl.run_scoped(mix, plgpu.ACC((TILE, channels), jnp.float32))
        acc = acc * lax.broadcast_in_dim(shrink, (TILE, channels), [0]) + mixed
        pl.when(step + STAGES < steps)(partial(fetch, step + STAGES, slot))
        return acc, above, total

    hint = (lambda x, layout: x) if interpret else plgpu.layout_cast
    R1 = plgpu.Layout.WGMMA.reduce(1)
    init = (hint(jnp.zeros((TILE, channels), jnp.float32), plgpu.Layout.WGMMA), hint(jnp.full((TILE,), LOW, jnp.float32), R1), hint(jnp.zeros((TILE,), jnp.float32), R1))
    acc, top, total = lax.fori_loop(0, steps, body, init)
    out_smem[...] = acc
    stat_smem[0] = top
    stat_smem[1] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, shape.kept)], out.at[row, tile, split])
    plgpu.copy_smem_to_gmem(stat_smem, stats.at[row, tile, split])
    plgpu.wait_smem_to_gmem(0)


def attend(query, keys, values, length, mask, scale, *, window=None, depth=None, softcap=None, interpret=False, splits=None, block=64):
    batch, rows, heads, channels = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    scratch = rows if mask is None else mask.shape[2]
    tiles = -(-rows * (heads // kv_heads) // TILE)
    blocks = -(-slots // block)
    if splits is None:
        splits = max(1, min(blocks, SMS // (batch * kv_heads * tiles)))
    shape = Shape(batch, rows, scratch, heads, kv_heads, slots, channels, mask is not None, window, softcap, scale, block, splits)
    if slots < block:
        pad = ((0, 0), (0, 0), (0, block - slots), (0, 0))
        keys, values = jnp.pad(keys, pad), jnp.pad(values, pad)
    group = shape.group
    padded = tiles * TILE

    def to_tiles(x, fill=0):  # [B, T, ...] -> rows of tiles, row-major t, g
        x = jnp.repeat(x, group, axis=1)
        x = jnp.pad(x, ((0, 0), (0, padded - rows * group)), constant_values=fill)
        return x.reshape(batch, tiles, TILE)

    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
    depth = row if depth is None else depth.astype(jnp.int32)
    low = depth - (window or 0)
    if mask is None:
        infos = [to_tiles(row)]
        seen = jnp.full((batch, 2), rows - 1, jnp.int32)
    else:
        if window is not None:
            mask = mask & (depth[:, :, None] - depth[:, None, :] < window)
        words = lax.bitcast_convert_type(pack(mask), jnp.int32)
        infos = [to_tiles(words[..., 0]), to_tiles(words[..., 1])]
        seen = lax.bitcast_convert_type(pack(jnp.any(mask, axis=1, keepdims=True)), jnp.int32)[:, 0]
    if window is not None:
        infos.append(to_tiles(low))
    infos = jnp.stack(infos, axis=2)
    length = length.astype(jnp.int32)
    first, count = spans(length, rows, scratch, slots, window, block)
    facts = jnp.stack([first, count, length, length + scratch - 1, seen[:, 0], seen[:, 1], jnp.min(low, 1), jnp.max(low, 1)], axis=1).astype(jnp.int32)

    q = query.reshape(batch, rows, kv_heads, group, channels).transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows * group, channels)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows * group), (0, 0))).reshape(batch, kv_heads * tiles, TILE, channels).astype(keys.dtype)
    dtype = keys.dtype
    call = compat.gpu_kernel(
        partial(kernel, shape, interpret),
        out_type=(jax.ShapeDtypeStruct((batch, kv_heads * tiles, splits, shape.kept, channels), jnp.float32), jax.ShapeDtypeStruct((batch, kv_heads * tiles, splits, 2, TILE), jnp.float32)),
        grid=(splits, kv_heads * tiles, batch), grid_names=("split", "tile", "row"),
        scratch_types=[
            plgpu.SMEM((TILE, channels), dtype),
            plgpu.SMEM((STAGES, block, channels), dtype),
            plgpu.SMEM((STAGES, block, channels), dtype),
            plgpu.SMEM((TILE, block), dtype),
            plgpu.SMEM(infos.shape[2:], jnp.int32),
            plgpu.SMEM((TILE, channels), jnp.float32),
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_barriers=STAGES),
        ],
        interpret=interpret,
    )
    parts, stats = call(q, keys, values, infos, facts)
    stats = stats[..., : shape.kept]
    top, total = stats[:, :, :, 0], stats[:, :, :, 1]
    weight = jnp.exp2(top - jnp.max(top, axis=2, keepdims=True))
    mixed = jnp.einsum("bzsm,bzsmc->bzmc", weight, parts) / jnp.einsum("bzsm,bzsm->bzm", weight, total)[..., None]
    mixed = mixed.reshape(batch, kv_heads, tiles * shape.kept, channels)[:, :, : rows * group]
    mixed = mixed.reshape(batch, kv_heads, rows, group, channels).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(query.shape).astype(values.dtype)
