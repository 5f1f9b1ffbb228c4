"""Verification attention on TPU: flash decoding of a tile of rows over a long cache.

Grid (B, K, splits, row tiles, steps); the last dimension runs in order, the others in
any. A step multiplies a tile [rows, C] of the N x G query rows that share a kv head with
one block of keys and of values, all in VMEM, and keeps an online softmax (arXiv
2205.14135) in float32 scratch. The blocks are walked from the first that any row sees to
the last, in a ring across its end; steps beyond it name the same block again, and a block
is copied only when its index changes, so no other slot leaves HBM. With ``splits`` each
part of the walk keeps its own sums, joined outside by log-sum-exp.

Which slots a row sees follows from four scalars a sequence (`Reach`, prefetched to SMEM)
and four words a row: its index, its depth and the bits of its tree. Static: shapes,
window, soft cap, scale, block, splits. Traced: lengths, trees, depths.

jax's own `ragged_paged_attention` would not serve: it is causal only, so it takes no
tree, and it wants keys and values interleaved in pages. Splash attention's masks are
known when it is traced, and it has neither lengths nor rings.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jspec.errors import JspecError
from jspec.models.layers import soft_cap
from jspec.pallas import compat
from jspec.pallas.attention.reference import MAX_NODES, pack

MAX_HEAD_DIM = 256
MAX_TILE = 512
"""Query rows of a tile; more (a prompt) are cut into tiles that each read the cache."""

LANES = 128
NOWHERE = 1 << 20
"""The node of a slot that no row sees."""

DTYPES = (jnp.float32, jnp.bfloat16)


class Reach(NamedTuple):
    """Where each sequence's visible slots lie; a slot's node is its scratch row, -1 the newest committed."""

    offset: Int[Array, "B"]  # the slot of node 0, less a turn of the ring where the scratch rows wrap
    oldest: Int[Array, "B"]  # the first node that any row sees
    first: Int[Array, "B"]  # its block
    span: Int[Array, "B"]  # blocks from there to the last that any row sees, around the ring


class Settings(NamedTuple):
    """What a kernel is built for."""

    slots: int
    scratch: int  # R
    block: int
    splits: int
    tree: bool
    scale: float
    window: int | None
    softcap: float | None
    upright: bool  # a block is [C, block], not [block, C]

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.slots, self.block)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.blocks, self.splits)


def attend_tpu(
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
    block: int = 1024,
    splits: int = 1,
) -> Float[Array, "B T H C"]:
    """`jspec.models.layers.attend` as a TPU kernel: same arguments, same meaning, same dtype out.

    Any G and T; float32 or bfloat16; C a multiple of 8 up to 256; a tree up to 64 scratch
    rows. Any S, but where C is a multiple of 128 and S none of 8, XLA keeps the cache in
    another order and copies it for each call. Slots that are neither committed nor scratch
    may hold anything, NaN included. ``block``: slots a step, a multiple of 128 on a chip.
    ``splits``: parts of the walk that may run on different cores; 2 pays on chips with two
    of them (v4, v5p) where B x K is odd. ``interpret``: `compat.tpu_interpreter()` on a
    CPU. Raises `JspecError`.

    >>> x = jnp.ones((1, 1, 16, 8))
    >>> attend_tpu(x[:, :, :2], x, x, jnp.array([3]), None, 1.0, interpret=True).shape
    (1, 1, 2, 8)
    """
    _check(query, keys, values, mask, window, block, splits)
    batch, rows, heads, head_dim = query.shape
    kv_heads, slots = keys.shape[1:3]
    scratch = rows if mask is None else mask.shape[2]
    block = min(block, slots + -slots % LANES)
    # XLA keeps a cache whose heads do not fill the lanes with the slots along them, unpadded.
    upright = head_dim % LANES != 0
    settings = Settings(slots, scratch, block, splits, mask is not None, scale, window, softcap, upright)
    group = heads // kv_heads
    tiled = query.reshape(batch, rows, kv_heads, group, head_dim).swapaxes(1, 2)
    tiled = tiled.reshape(batch, kv_heads, rows * group, head_dim)
    words = jnp.repeat(_words(batch, rows, mask, window, depth), group, axis=1)
    tile = pl.cdiv(rows * group, pl.cdiv(rows * group, MAX_TILE))
    tile += -tile % 16  # sublanes of bfloat16
    rest = -rows * group % tile
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, rest), (0, 0)))
    words = jnp.pad(words, ((0, 0), (0, rest), (0, 0)))
    mixed = _call(settings, tile, _reach(settings, length, depth), words, tiled, keys, values, interpret)
    mixed = mixed[:, :, : rows * group].reshape(batch, kv_heads, rows, group, head_dim)
    return mixed.swapaxes(1, 2).reshape(batch, rows, heads, head_dim)


def _check(query, keys, values, mask, window, block: int, splits: int) -> None:
    """Say what the kernel cannot take."""
    rows, heads, head_dim = query.shape[1:]
    for name, array in (("query", query), ("keys", keys), ("values", values)):
        if array.dtype not in DTYPES:
            raise JspecError(f"{name} of dtype {array.dtype}: the TPU kernel takes float32 and bfloat16")
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        raise JspecError(f"head_dim {head_dim}: the TPU kernel takes multiples of 8 up to {MAX_HEAD_DIM}")
    if heads % keys.shape[1]:
        raise JspecError(f"{heads} query heads are no multiple of {keys.shape[1]} kv heads")
    if block % 16 or block < 16 or splits < 1:
        raise JspecError(f"block {block} and splits {splits} should be a multiple of 16 and at least 1")
    if mask is None:
        return
    if mask.shape[2] > MAX_NODES:
        raise JspecError(f"{mask.shape[2]} scratch rows of a tree: the TPU kernel takes {MAX_NODES} at most")
    if mask.shape[2] < rows:
        raise JspecError(f"{rows} rows are more than the {mask.shape[2]} scratch rows of the mask")
    if window is not None and mask.shape[2] != rows:
        raise JspecError("a layer with a window takes its scratch rows in one pass")


def _words(batch: int, rows: int, mask, window: int | None, depth) -> Int[Array, "B T 4"]:
    """What a row needs to know of itself: its index, its depth, and the bits of its tree."""
    index = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
    depth = index if depth is None else depth.astype(jnp.int32)
    if mask is None:
        return jnp.stack([index, depth, index, index], axis=-1)  # no bits
    if window is not None:
        mask = mask & (depth[:, :, None] - depth[:, None, :] < window)
    bits = jax.lax.bitcast_convert_type(pack(mask), jnp.int32)
    return jnp.concatenate([index[..., None], depth[..., None], bits], axis=-1)


def _reach(settings: Settings, length: Int[Array, "B"], depth: Int[Array, "B T"] | None) -> Reach:
    """The cyclic interval of slots that the rows of each sequence see."""
    slots, block, window = settings.slots, settings.block, settings.window
    length = length.astype(jnp.int32)
    newest = length + settings.scratch - 1
    if window is None:
        span = jnp.minimum(newest, slots - 1) // block + 1
        return Reach(length, -length, jnp.zeros_like(length), span)
    shallow = 0 if depth is None else depth.astype(jnp.int32).min(axis=1)
    oldest = jnp.clip(length + shallow - window + 1, 0, length)
    first = oldest % slots // block
    last = oldest % slots + jnp.minimum(newest - oldest, slots - 1)  # beyond the end: around the ring
    blocks = jnp.where(last < slots, last, last - slots) // block
    span = jnp.where(last < slots, blocks - first + 1, settings.blocks - first + blocks + 1)
    offset = newest % slots - (settings.scratch - 1)
    return Reach(offset, oldest - length, first, jnp.minimum(span, settings.blocks))


def _share(settings: Settings, span):
    """Steps of a split: the walk in equal parts, by its own length and not by the cache's."""
    return jax.lax.div(span + jnp.int32(settings.splits - 1), jnp.int32(settings.splits))


def _block_at(settings: Settings, reach: Reach, b, split, step):
    """The block of a step; steps beyond the last repeat it, so that nothing is copied for them."""
    share = _share(settings, reach.span[b])
    turn = jnp.minimum(split * share + jnp.minimum(step, share - 1), reach.span[b] - 1)
    block = reach.first[b] + turn
    return jnp.where(block < settings.blocks, block, block - settings.blocks)


def _call(settings: Settings, tile: int, reach: Reach, words, query, keys, values, interpret: Any):
    """Run the grid: [B, K, rows, C] queries to the same of mixed values."""
    splits, dtype = settings.splits, values.dtype
    if settings.upright:
        keys, values = keys.swapaxes(2, 3), values.swapaxes(2, 3)
    shape = (*query.shape[:2], splits, query.shape[2])
    out_shape = [jax.ShapeDtypeStruct((*shape, query.shape[3]), dtype if splits == 1 else jnp.float32)]
    if splits > 1:
        out_shape.append(jax.ShapeDtypeStruct((*shape, 1), jnp.float32))
    mixed, *logsum = pl.pallas_call(
        partial(_kernel, settings),
        out_shape=out_shape,
        grid_spec=_grid_spec(settings, tile, query.shape),
        compiler_params=compat.tpu_params(*["parallel"] * 4, "arbitrary"),
        interpret=interpret,
        name="verification_attention",
    )(*reach, words, query, keys, values)
    if splits == 1:
        return mixed[:, :, 0]
    weights = jax.nn.softmax(logsum[0], axis=2)
    return jnp.sum(weights * mixed, axis=2).astype(dtype)


def _grid_spec(settings: Settings, tile: int, shape: tuple[int, ...]) -> pltpu.PrefetchScalarGridSpec:
    """The grid, what each step reads and writes, and the sums that steps hand on."""
    batch, kv_heads, rows, head_dim = shape
    splits, block = settings.splits, settings.block

    def rows_of(b, k, split, r, step, *reach):
        return b, k, r, 0

    def cache_of(b, k, split, r, step, *reach):
        at = _block_at(settings, Reach(*reach), b, split, step)
        return (b, k, 0, at) if settings.upright else (b, k, at, 0)

    def part_of(b, k, split, r, step, *reach):
        return b, k, split, r, 0

    cache_spec = pl.BlockSpec(
        (None, None, head_dim, block) if settings.upright else (None, None, block, head_dim), cache_of
    )
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(Reach._fields),
        grid=(batch, kv_heads, splits, rows // tile, settings.steps),
        in_specs=[
            pl.BlockSpec((None, tile, 4), lambda b, k, split, r, *_: (b, r, 0)),
            pl.BlockSpec((None, None, tile, head_dim), rows_of),
            cache_spec,
            cache_spec,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, tile, width), part_of)
            for width in ([head_dim] if splits == 1 else [head_dim, 1])
        ],
        scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32) for width in (head_dim, 1, 1)],
    )


def _kernel(settings: Settings, offset, oldest, first, span, words, query, keys, values, mixed, *rest):
    """One step: a block of keys and values against a tile of rows."""
    *logsum, sums, top, total = rest
    b, split, step = pl.program_id(0), pl.program_id(2), pl.program_id(4)
    share = _share(settings, span[b])
    block = _block_at(settings, Reach(offset, oldest, first, span), b, split, step)
    start = block * settings.block
    active = (step < share) & (split * share + step < span[b])
    committed = start + settings.block <= jnp.minimum(offset[b], settings.slots)
    committed &= settings.window is None

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)

    @pl.when(active & committed)
    def _():  # every row sees every slot
        _add(settings, _scores(settings, query, keys), values[...], sums, top, total)

    @pl.when(active & jnp.logical_not(committed))
    def _():
        size = settings.block
        node, there = _nodes(settings, start, offset[b], oldest[b], (1, size))
        visible = _visible(settings, words[...], jnp.where(there, node, NOWHERE))
        scores = jnp.where(visible, _scores(settings, query, keys), -jnp.inf)
        # A weight of 0 does not silence a NaN.
        if not settings.upright:
            _, there = _nodes(settings, start, offset[b], oldest[b], (size, 1))
        kept = jnp.where(there, values[...].astype(jnp.float32), 0.0).astype(values.dtype)
        _add(settings, scores, kept, sums, top, total)

    @pl.when(step == settings.steps - 1)
    def _():
        # A row may see nothing in a split: 0, and exp(-inf) of it.
        mixed[...] = (sums[...] / jnp.where(total[...] == 0, 1.0, total[...])).astype(mixed.dtype)
        if logsum:
            logsum[0][...] = top[...] + jnp.log(total[...])


def _nodes(settings: Settings, start, offset, oldest, shape: tuple[int, int]):
    """The nodes of a block's slots, along the longer side of ``shape``, and which of them any row may see."""
    slot = start + jax.lax.broadcasted_iota(jnp.int32, shape, shape.index(max(shape)))
    node = slot - offset
    if settings.window is not None:
        node = jnp.where(node >= settings.scratch, node - settings.slots, node)
    return node, (slot < settings.slots) & (node < settings.scratch) & (node >= oldest)


def _visible(settings: Settings, words, node):
    """[rows, block]: whether a row sees a node, as `jspec.models.layers.visible_slots` has it."""
    node = jnp.broadcast_to(node, (words.shape[0], node.shape[1]))
    if settings.tree:
        word = jnp.where(node < 32, words[:, 2:3], words[:, 3:4])
        bit = jax.lax.shift_right_logical(word, node & 31) & 1
        visible = (node < 0) | ((bit == 1) & (node < NOWHERE))
    else:
        visible = node <= words[:, 0:1]
    if settings.window is None:
        return visible
    near = node > words[:, 1:2] - settings.window
    return visible & ((node >= 0) | near) if settings.tree else visible & near


def _scores(settings: Settings, query, keys):
    """[rows, block] scaled scores, in float32."""
    wide = jnp.promote_types(query.dtype, keys.dtype)
    scores = (
        _dot(query[...].astype(wide), keys[...].astype(wide), (1, 0 if settings.upright else 1))
        * settings.scale
    )
    return scores if settings.softcap is None else soft_cap(scores, settings.softcap)


def _dot(left, right, sides: tuple[int, int]):
    # Products of bfloat16 are exact; of float32 they follow jax_default_matmul_precision.
    precision = jax.lax.Precision.DEFAULT if left.dtype == jnp.bfloat16 else None
    contracted = (sides[:1], sides[1:]), ((), ())
    return jax.lax.dot_general(
        left, right, contracted, precision=precision, preferred_element_type=jnp.float32
    )


def _add(settings: Settings, scores, values, sums, top, total) -> None:
    """Take a block into the online softmax."""
    before = top[...]
    after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    base = jnp.where(after == -jnp.inf, 0.0, after)  # nothing seen so far
    weights, shrink = jnp.exp(scores - base), jnp.exp(before - base)
    total[...] = shrink * total[...] + jnp.sum(weights, axis=1, keepdims=True)
    mixed = _dot(weights.astype(values.dtype), values, (1, 1 if settings.upright else 0))
    sums[...] = shrink * sums[...] + mixed
    top[...] = after
