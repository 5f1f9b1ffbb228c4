"""The device side of `jspec.pallas.attention.gpu`: what one program of the grid does.

A program is one warpgroup with a tile of 64 query rows, the M of wgmma, and a run of the
blocks of its sequence. Shared memory holds the tile, `Shape.stages` blocks of K and of V,
the weights of one block in bfloat16 and the sums on their way out; the sums themselves,
the maxima and the totals stay in registers. Values whose use the compiler could not see
(dead ones) must not be written here: jax 0.10 then finds no layout for them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jspec.models.layers import soft_cap
from jspec.pallas import compat

TILE = 64
"""Query rows of a program: the M of wgmma."""
STAGES = 4
"""Blocks of K and V in flight: 128 kB at head_dim 128, enough to hide the memory's latency."""
SMEM_BYTES = 225 * 1024
LOWEST = -1e30  # a maximum of nothing: finite, for inf - inf is NaN


class Shape(NamedTuple):
    """What is static in a call; ``slots`` may be fewer than the padded cache's."""

    batch: int
    rows: int
    scratch: int
    kv_heads: int
    group: int
    slots: int
    head_dim: int
    tree: bool
    window: int | None
    block: int
    splits: int

    @property
    def tiles(self) -> int:
        """Tiles that share a kv head."""
        return -(-self.rows * self.group // TILE)

    @property
    def kept(self) -> int:
        """Rows of a tile that are copied in and out: a multiple of the 8 of a swizzled tile."""
        return min(TILE, -(-self.rows * self.group // 8) * 8)

    @property
    def blocks(self) -> int:
        return -(-self.slots // self.block)

    @property
    def words(self) -> int:
        """Integers that say what a query row sees: two words or a last node; and the window's end."""
        return (2 if self.tree else 1) + (self.window is not None)

    @property
    def stages(self) -> int:
        fixed = TILE * (self.head_dim * (2 + 4) + self.block * 2 + (self.words + 2) * 4)
        return min(STAGES, (SMEM_BYTES - fixed) // (4 * self.block * self.head_dim))


class Facts(NamedTuple):
    """Integers of a sequence, [B] each, or scalars read from the array [B, 8] that they are stacked to."""

    first: Any  # block to begin with; a ring goes on from its last block to block 0
    count: Any  # blocks with a slot that some row sees
    length: Any
    newest: Any  # slot of the last scratch row, in a ring
    seen_low: Any  # nodes that some row sees, two words; without a tree the last of them
    seen_high: Any
    oldest: Any  # the window of the shallowest row sees nodes after this one
    oldest_all: Any  # and that of the deepest row after this one


class Scratch(NamedTuple):
    """A program's shared memory and barriers."""

    query: Any
    keys: Any
    values: Any
    weights: Any
    infos: Any
    sums: Any
    stats: Any
    begun: Any  # the query and its infos are there
    keys_there: Any
    values_there: Any


def scratch(shape: Shape) -> Scratch:
    """What to allocate for a program; `Shape.stages` keeps it within `SMEM_BYTES`."""
    ring = (shape.stages, shape.block, shape.head_dim)
    return Scratch(
        query=plgpu.SMEM((TILE, shape.head_dim), jnp.bfloat16),
        keys=plgpu.SMEM(ring, jnp.bfloat16),
        values=plgpu.SMEM(ring, jnp.bfloat16),
        weights=plgpu.SMEM((TILE, shape.block), jnp.bfloat16),
        infos=plgpu.SMEM((shape.words, TILE), jnp.int32),
        sums=plgpu.SMEM((TILE, shape.head_dim), jnp.float32),
        stats=plgpu.SMEM((2, TILE), jnp.float32),
        begun=plgpu.Barrier(num_arrivals=2),
        keys_there=plgpu.Barrier(num_barriers=shape.stages),
        values_there=plgpu.Barrier(num_barriers=shape.stages),
    )


def kernel(
    shape: Shape,
    scale: float,
    softcap: float | None,
    interpret: Any,
    query: Any,
    keys: Any,
    values: Any,
    infos: Any,
    facts: Any,
    sums: Any,
    stats: Any,
    *memory: Any,
) -> None:
    """One split of one tile of one sequence: copy its blocks, fold them in, write the sums."""
    own, f32 = Scratch(*memory), jnp.float32
    split, tile, row = (lax.axis_index(name) for name in ("split", "tile", "row"))
    head, part = (tile, 0) if shape.tiles == 1 else (tile // shape.tiles, tile % shape.tiles)
    about = Facts(*(facts[row, index] for index in range(len(Facts._fields))))
    share = (about.count + shape.splits - 1) // shape.splits
    begin = split * share
    steps = jnp.clip(about.count - begin, 0, share)

    def place(step: Any) -> tuple[Any, Any]:
        """The first slot of a step's block, and of its copy, which may not pass the cache's end."""
        index = about.first + begin + step
        index = jnp.where(index >= shape.blocks, index - shape.blocks, index)
        return index * shape.block, jnp.minimum(index * shape.block, keys.shape[2] - shape.block)

    def fetch(step: Any, stage: Any) -> None:
        at = (row, head, pl.ds(place(step)[1], shape.block))
        plgpu.copy_gmem_to_smem(keys.at[at], own.keys.at[stage], own.keys_there.at[stage])
        plgpu.copy_gmem_to_smem(values.at[at], own.values.at[stage], own.values_there.at[stage])

    def body(step: Any, carry: tuple) -> tuple:
        stage = lax.rem(step, shape.stages)
        carry = _fold(shape, scale, softcap, interpret, own, about, stage, *place(step), carry)
        pl.when(step + shape.stages < steps)(partial(fetch, step + shape.stages, stage))
        return carry

    # The rest of the tile stays what it was: rows do not mix, and these are not written.
    plgpu.copy_gmem_to_smem(query.at[row, tile], own.query.at[pl.ds(0, shape.kept)], own.begun)
    plgpu.copy_gmem_to_smem(infos.at[row, part], own.infos, own.begun)
    for stage in range(shape.stages):
        pl.when(stage < steps)(partial(fetch, stage, stage))
    plgpu.barrier_wait(own.begun)
    width = (TILE, shape.head_dim)
    nothing = (jnp.zeros(width, f32), jnp.full((TILE,), LOWEST, f32), jnp.zeros((TILE,), f32))
    own.sums[...], own.stats[0], own.stats[1] = lax.fori_loop(0, steps, body, nothing)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own.sums.at[pl.ds(0, shape.kept)], sums.at[row, tile, split])
    plgpu.copy_smem_to_gmem(own.stats, stats.at[row, tile, split])
    plgpu.wait_smem_to_gmem(0)


def _fold(
    shape: Shape,
    scale: float,
    softcap: float | None,
    interpret: Any,
    own: Scratch,
    about: Facts,
    stage: Any,
    nominal: Any,
    start: Any,
    carry: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """One block into the running sums, maxima and totals (online softmax, base 2)."""
    sums, top, total = carry
    whole = _seen_whole(shape, about, nominal, start)
    plgpu.barrier_wait(own.keys_there.at[stage])
    scores = _products(own.query, own.keys.at[stage], interpret) * scale
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    scores = lax.cond(whole, lambda x: x, partial(_mask, shape, own, about, nominal, start), scores)
    scores *= math.log2(math.e)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    shrink = jnp.exp2(top - higher)
    weights = jnp.exp2(scores - _across(higher, shape.block))
    own.weights[...] = weights.astype(own.weights.dtype)
    plgpu.barrier_wait(own.values_there.at[stage])
    pl.when(~whole)(partial(_clear, shape, own.values.at[stage], about, nominal, start))
    plgpu.commit_smem()

    def mix(result: Any) -> Array:
        plgpu.wgmma(result, own.weights, own.values.at[stage])
        return result[...]

    mixed = pl.run_scoped(mix, plgpu.ACC((TILE, shape.head_dim), jnp.float32))
    return sums * _across(shrink, shape.head_dim) + mixed, higher, total * shrink + jnp.sum(weights, axis=1)


def _across(column: Array, width: int) -> Array:
    return lax.broadcast_in_dim(column, (TILE, width), [0])


def _products(query: Any, keys: Any, interpret: Any) -> Array:
    """Q times K transposed, [64, block] in float32."""
    if interpret and not compat.INTERPRETS_TRANSPOSED:
        both = (((1,), (1,)), ((), ()))
        return lax.dot_general(query[...], keys[...], both, preferred_element_type=jnp.float32)

    def multiply(result: Any) -> Array:
        plgpu.wgmma(result, query, keys.T)
        return result[...]

    return pl.run_scoped(multiply, plgpu.ACC((query.shape[0], keys.shape[0]), jnp.float32))


def _mask(shape: Shape, own: Scratch, about: Facts, nominal: Any, start: Any, scores: Array) -> Array:
    """Scores with -inf where a query row does not see the slot."""
    words = [_across(own.infos[word], shape.block) for word in range(shape.words)]
    slot = lax.broadcasted_iota(jnp.int32, scores.shape, 1) + start
    return jnp.where(_visible(shape, about, nominal, slot, words), scores, -jnp.inf)


def _clear(shape: Shape, values: Any, about: Facts, nominal: Any, start: Any) -> None:
    """Put 0 for the values that no row of the sequence sees."""
    words = [about.seen_low, about.seen_high] if shape.tree else [about.seen_low]
    slot = lax.broadcasted_iota(jnp.int32, values.shape, 0) + start
    seen = _visible(shape, about, nominal, slot, [*words, about.oldest])
    values[...] = jnp.where(seen, values[...], jnp.zeros((), values.dtype))


def _node(shape: Shape, about: Facts, slot: Any) -> Any:
    """The scratch row that slots hold; committed entries count down from -1."""
    if shape.window is None:
        return slot - about.length
    node = slot - (about.newest - shape.scratch + 1)
    return jnp.where(slot > about.newest, node - shape.slots, node)


def _seen_whole(shape: Shape, about: Facts, nominal: Any, start: Any) -> Any:
    """Whether all rows see all slots of a block."""
    if shape.window is None:
        whole = start + shape.block <= about.length
    else:
        first, last = (_node(shape, about, start + offset) for offset in (0, shape.block - 1))
        whole = (last - first == shape.block - 1) & (last < 0)
        whole &= (first > about.oldest_all) & (first + about.length >= 0)
    return whole & (start == nominal) if shape.slots % shape.block else whole


def _visible(shape: Shape, about: Facts, nominal: Any, slot: Array, words: list) -> Array:
    """Which slots are seen, by the ``words`` of a query row or, as scalars, of all together."""
    node = _node(shape, about, slot)
    near = None
    if shape.window is not None:
        near = (node > words[-1]) & (node + about.length >= 0)
    if shape.tree:
        bit = lax.shift_right_logical(jnp.where(node < 32, words[0], words[1]), node & 31) & 1
        seen = (node >= 0) & (node < shape.scratch) & (bit == 1)
        seen |= (node < 0) if near is None else (node < 0) & near
    else:
        seen = node <= words[0] if near is None else (node <= words[0]) & near
    if shape.slots % shape.block:
        # The last block's copy begins earlier, at slots of the block before; and a cache
        # smaller than a block is padded.
        seen &= (slot >= nominal) & (slot < shape.slots)
    return seen
