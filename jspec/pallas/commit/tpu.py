"""The commit of an accepted path on TPU: the entries of all layers move in one call, in place.

`jspec.pallas.commit.reference` says what moves. Memory is copied in tiles of 8 slots (float32) or 16
(bfloat16), 4 kB a head of head_dim up to 128, so an entry travels with the tile that holds
it, and the tile that it goes to is read, changed and written back. Source tiles lie apart
and are not changed. A row with m moves reads at most m of them, and reads and writes at
most (m + 6) // 8 + 1 target tiles ((m + 14) // 16 + 1), for each head of each buffer;
neighbours in a tile share it.

Grid (B,): rows are independent. All 2 L buffers [B, K, S, C] stay in HBM, each aliased with
its result; they pass through VMEM in chunks of one size, two at a time, so that the copies
of one overlap the moves of the other. path and length are prefetched to SMEM. Static: L, B,
K, S, C, P and which layers are rings; traced: path and length.

Layers that tiles do not fill are left to the plain code, in the same function: XLA lays such
a cache out with the slots further out, and a kernel's own order would cost two copies of it.
(With a head_dim that is no multiple of 128 the plain code pays such copies too.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from jspec.cache.dense import Entry
from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.commit.reference import check, compact_ref

TILES = {"float32": 8, "bfloat16": 16}
"""Slots in a tile, which is the least that can be copied."""

VMEM = 4 << 20
"""Bytes for each of the two chunks that are in VMEM at a time."""


class Kind(NamedTuple):
    """Buffers of one size, in which the same slots move."""

    slots: int
    ring: bool
    buffers: tuple[int, ...]


class Scratch(NamedTuple):
    """What two chunks of buffers take on the chip."""

    sources: Any  # VMEM [2, buffers, P - 1, K, tile, C]
    targets: Any  # VMEM [2, buffers, tiles, K, tile, C]
    read: Any  # [2] semaphores
    written: Any


class Step(NamedTuple):
    """An entry that moves, and where its old and its new tile lie in VMEM."""

    source: Array  # slots of the buffer
    target: Array
    source_place: Array
    target_place: Array
    new_source: Array  # whether it is the first of its tile
    new_target: Array


def compact_tpu(
    layers: tuple[Entry, ...],
    path: Int[Array, "B P"],
    length: Int[Array, "B"],
    wraps: Sequence[bool] = (),
    *,
    interpret: Any = False,
) -> tuple[Entry, ...]:
    """Do what `jspec.cache.dense.compact` does to the accepted nodes; every other slot keeps its bits.

    Layers whose slots are no multiple of a tile, and rings in which a path may come back to
    the tile that it began in, are left to the plain code.

    Raises:
        JspecError: a cache that is neither float32 nor bfloat16, layers of different
            heads or dtypes, or a path so long that its tiles do not fit into VMEM.
    """
    check(layers, list(TILES))
    tile, paths = TILES[str(layers[0].keys.dtype)], path.shape[1]
    if paths == 1:  # the root alone, which stays
        return layers
    rings = tuple(wraps) or (False,) * len(layers)
    plain = [
        _is_plain(entry.keys.shape[2], ring, paths, tile) for entry, ring in zip(layers, rings, strict=True)
    ]
    kinds: dict[tuple[int, bool], tuple[int, ...]] = {}
    buffers: list[Array] = []
    for entry, ring, left in zip(layers, rings, plain, strict=True):
        if not left:
            key = (entry.keys.shape[2], ring)
            kinds[key] = (*kinds.get(key, ()), len(buffers), len(buffers) + 1)
            buffers += entry
    listed = [Kind(*key, members) for key, members in kinds.items()]
    moved = iter(_move(buffers, path, length, listed, tile, interpret) if buffers else ())
    return tuple(
        compact_ref((entry,), path, length, (ring,))[0] if left else Entry(next(moved), next(moved))
        for entry, ring, left in zip(layers, rings, plain, strict=True)
    )


def _is_plain(slots: int, ring: bool, paths: int, tile: int) -> bool:
    """Whether a layer is left to the plain code: tiles do not fill it, or a path meets its own tile again."""
    return slots % tile != 0 or (ring and paths - 1 > slots - tile + 1)


def _move(
    buffers: list[Array], path: Array, length: Array, kinds: list[Kind], tile: int, interpret: Any
) -> Sequence[Array]:
    """Call the kernel: for buffers of several sizes, which have the other dimensions in common."""
    dtype, heads, head_dim = buffers[0].dtype, buffers[0].shape[1], buffers[0].shape[3]
    most = path.shape[1] - 1  # moves of a row
    targets = (most + tile - 2) // tile + 1  # tiles that so many slots may touch
    size = (most + targets) * heads * tile * -(-head_dim // 128) * 128 * dtype.itemsize
    if size > VMEM:
        raise JspecError(
            f"the commit kernel has {VMEM} bytes of VMEM for a buffer, but the tiles of "
            f"a path of {most + 1} nodes, {heads} heads and head_dim {head_dim} take {size}"
        )
    group = min(VMEM // size, max(len(kind.buffers) for kind in kinds))
    whole = pl.BlockSpec(memory_space=pltpu.HBM)
    scratch = Scratch(
        *(pltpu.VMEM((2, group, n, heads, tile, head_dim), dtype) for n in (most, targets)),
        *(pltpu.SemaphoreType.DMA((2,)) for _ in range(2)),
    )
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(path.shape[0],),
        in_specs=[whole] * len(buffers),
        out_specs=[whole] * len(buffers),
        scratch_shapes=list(scratch),
    )
    return pl.pallas_call(
        functools.partial(_kernel, kinds=kinds, paths=most + 1, group=group),
        out_shape=[jax.ShapeDtypeStruct(b.shape, b.dtype) for b in buffers],
        grid_spec=spec,
        input_output_aliases={2 + index: index for index in range(len(buffers))},
        compiler_params=compat.tpu_params("parallel"),
        interpret=interpret,
        name="commit",
    )(path.astype(jnp.int32).reshape(-1), length.astype(jnp.int32), *buffers)


def _kernel(path, length, *refs, kinds: list[Kind], paths: int, group: int) -> None:
    """One row: chunk by chunk read, move and write."""
    row = pl.program_id(0)
    start, total = length[row], sum(len(kind.buffers) for kind in kinds)
    buffers, scratch = refs[total : 2 * total], Scratch(*refs[2 * total :])
    tile = scratch.sources.shape[4]
    chunks = [
        (kind, [buffers[index].at[row] for index in kind.buffers[at : at + group]])
        for kind in kinds
        for at in range(0, len(kind.buffers), group)
    ]

    def each(index: int, act: Callable[[Step], None]) -> None:
        _each(lambda i: path[row * paths + i], start, paths, tile, chunks[index][0], act)

    def copies(
        index: int, act: Callable[[Any], None], stage: Any, place: Array, slot: Array, out: bool = False
    ) -> None:
        """Start or await the copies of one tile of all buffers, into VMEM or out of it."""
        semaphore = (scratch.written if out else scratch.read).at[index % 2]
        memory = pl.ds(pl.multiple_of(_floor(slot, tile), tile), tile)
        for member, buffer in enumerate(chunks[index][1]):
            there, here = buffer.at[:, memory], stage.at[index % 2, member, place]
            source, target = (here, there) if out else (there, here)
            act(pltpu.make_async_copy(source, target, semaphore))

    def reads(index: int, act: Callable[[Any], None]) -> None:
        def one(step: Step) -> None:
            pl.when(step.new_source)(
                lambda: copies(index, act, scratch.sources, step.source_place, step.source)
            )
            pl.when(step.new_target)(
                lambda: copies(index, act, scratch.targets, step.target_place, step.target)
            )

        each(index, one)

    def writes(index: int, act: Callable[[Any], None]) -> None:
        def one(step: Step) -> None:
            pl.when(step.new_target)(
                lambda: copies(index, act, scratch.targets, step.target_place, step.target, out=True)
            )

        each(index, one)

    reads(0, _start)
    for index in range(len(chunks)):
        if index + 1 < len(chunks):
            if index:
                writes(index - 1, _wait)  # its place is the next chunk's
            reads(index + 1, _start)
        reads(index, _wait)
        turn, members = index % 2, len(chunks[index][1])
        each(index, functools.partial(_permute, scratch.sources.at[turn], scratch.targets.at[turn], members))
        writes(index, _start)
    for index in range(max(len(chunks) - 2, 0), len(chunks)):
        writes(index, _wait)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _floor(slot: Array, tile: int) -> Array:
    return slot - jax.lax.rem(slot, tile)  # `//` and `%` ask for the sign, and a slot has none


def _each(
    node_at: Callable[[Array], Array],
    start: Array,
    paths: int,
    tile: int,
    kind: Kind,
    act: Callable[[Step], None],
) -> None:
    """Act on every entry that moves, in the order of the path."""

    def one(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        sources, targets, last_source, last_target = carry
        node = node_at(i)
        source, target, moves = start + node, start + i, node > i
        if kind.ring:
            source, target = jax.lax.rem(source, kind.slots), jax.lax.rem(target, kind.slots)
        else:
            moves &= source < kind.slots
        source_tile, target_tile = _floor(source, tile), _floor(target, tile)
        new_source, new_target = moves & (source_tile != last_source), moves & (target_tile != last_target)
        sources += new_source.astype(jnp.int32)
        targets += new_target.astype(jnp.int32)
        step = Step(source, target, sources - 1, targets - 1, new_source, new_target)
        pl.when(moves)(lambda: act(step))
        last_source = jnp.where(moves, source_tile, last_source)
        return sources, targets, last_source, jnp.where(moves, target_tile, last_target)

    none, nowhere = jnp.int32(0), jnp.int32(-1)
    jax.lax.fori_loop(1, paths, one, (none, none, nowhere, nowhere))


def _permute(sources: Any, targets: Any, buffers: int, step: Step) -> None:
    """Put one entry of each buffer of a chunk into its new slot."""
    tile = sources.shape[3]
    new = jax.lax.rem(step.target, tile)
    shift = jax.lax.rem(new - jax.lax.rem(step.source, tile) + tile, tile)
    here = jax.lax.broadcasted_iota(jnp.int32, sources.shape[2:], 1) == new

    def one(member: Array, _: None) -> None:
        # Slots of a tile can be told apart only in 32 bits; both ways are exact.
        moved = pltpu.roll(sources[member, step.source_place].astype(jnp.float32), shift, 1)
        kept = targets[member, step.target_place]
        merged = jnp.where(here, moved, kept.astype(jnp.float32))
        targets[member, step.target_place] = merged.astype(kept.dtype)

    jax.lax.fori_loop(0, buffers, one, None)
