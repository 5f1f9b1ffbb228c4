"""The commit of an accepted path on TPU: the entries of all layers move in one call, in place.

`jspec.pallas.compact` says what moves. Memory is copied in tiles of 8 slots (float32) or 16
(bfloat16), 4 kB a head of up to 128 channels, so an entry travels with the tile that holds
it, and the tile that it goes to is read, changed and written back. Source tiles lie apart
and are not changed. A row with m moves reads at most m of them, and reads and writes at
most (m + 6) // 8 + 1 target tiles ((m + 14) // 16 + 1), for each head of each buffer;
neighbours in a tile share it.

Grid (B,): rows are independent. All 2 L buffers [B, K, S, C] stay in HBM, each aliased with
its result; they pass through VMEM in chunks, two at a time, so that the copies of one
overlap the moves of the other. path and length are prefetched to SMEM, where the list of a
row's tiles and moves is made, once for all layers of one size. Static: L, B, K, S, C, P and
which layers are rings; traced: path and length.
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

from jspec.cache import Entry
from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.compact import check, compact_ref

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
    """What a row needs: its plan for each kind of buffer, in SMEM, and two chunks of tiles, in VMEM."""

    counts: Any  # [kinds, 3]: source tiles, target tiles, moves
    sources: Any  # [kinds, P - 1]: numbers of tiles in a buffer
    targets: Any  # [kinds, tiles]
    moves: Any  # [kinds, 4 (P - 1)]: of each: its places in these two lists, shift, new slot in the tile
    source_tiles: Any  # [2, buffers, P - 1, K, tile, C]
    target_tiles: Any  # [2, buffers, tiles, K, tile, C]
    read: Any  # [2] semaphores
    written: Any


def compact(
    layers: tuple[Entry, ...],
    path: Int[Array, "B P"],
    length: Int[Array, "B"],
    wraps: Sequence[bool] = (),
    *,
    interpret: Any = False,
) -> tuple[Entry, ...]:
    """Do what `jspec.cache.compact` does to the accepted nodes; every other slot keeps its bits.

    Rings too small for a path and a tile are left to the plain code.

    Raises:
        JspecError: a cache that is neither float32 nor bfloat16, layers of different
            heads or dtypes, or a path so long that its tiles do not fit into VMEM.
    """
    check(layers, list(TILES))
    tile, paths = TILES[str(layers[0].keys.dtype)], path.shape[1]
    if paths == 1:  # the root alone, which stays
        return layers
    rings = tuple(wraps) or (False,) * len(layers)
    plain = [ring and e.keys.shape[2] < paths + tile for e, ring in zip(layers, rings, strict=True)]
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


def _move(
    buffers: list[Array], path: Array, length: Array, kinds: list[Kind], tile: int, interpret: Any
) -> Sequence[Array]:
    """Call the kernel: for buffers of several sizes, which have the other dimensions in common."""
    dtype, heads, channels = buffers[0].dtype, buffers[0].shape[1], buffers[0].shape[3]
    most = path.shape[1] - 1  # moves of a row
    targets = (most + tile - 2) // tile + 2  # one more where a ring ends within a tile
    size = (most + targets) * heads * tile * -(-channels // 128) * 128 * dtype.itemsize
    if size > VMEM:
        raise JspecError(
            f"the commit kernel has {VMEM} bytes of VMEM for a buffer, but the tiles of "
            f"a path of {most + 1} nodes, {heads} heads and {channels} channels take {size}"
        )
    group = min(VMEM // size, max(len(kind.buffers) for kind in kinds))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    scratch = Scratch(
        *(pltpu.SMEM((len(kinds), n), jnp.int32) for n in (3, most, targets, 4 * most)),
        *(pltpu.VMEM((2, group, n, heads, tile, channels), dtype) for n in (most, targets)),
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
        functools.partial(_kernel, kinds=kinds, group=group),
        out_shape=[jax.ShapeDtypeStruct(b.shape, b.dtype) for b in buffers],
        grid_spec=spec,
        input_output_aliases={2 + index: index for index in range(len(buffers))},
        compiler_params=compat.tpu_params("parallel"),
        interpret=interpret,
        name="commit",
    )(path.astype(jnp.int32).reshape(-1), length.astype(jnp.int32), *buffers)


def _kernel(path, length, *refs, kinds: list[Kind], group: int) -> None:
    """One row: its plan, then chunk by chunk read, move and write."""
    row = pl.program_id(0)
    total = sum(len(kind.buffers) for kind in kinds)
    buffers, scratch = refs[total : 2 * total], Scratch(*refs[2 * total :])
    for number, kind in enumerate(kinds):
        _plan(path, length, row, scratch, number, kind)
    chunks = [
        (number, kind.buffers[at : at + group])
        for number, kind in enumerate(kinds)
        for at in range(0, len(kind.buffers), group)
    ]

    def reads(index: int, act: Callable) -> None:
        number, members = chunks[index]
        turn = index % 2
        for place, member in enumerate(members):
            buffer, read = buffers[member].at[row], scratch.read.at[turn]
            sources, targets = scratch.source_tiles.at[turn, place], scratch.target_tiles.at[turn, place]
            _copies(act, buffer, sources, scratch.sources, number, scratch.counts[number, 0], read)
            _copies(act, buffer, targets, scratch.targets, number, scratch.counts[number, 1], read)

    def writes(index: int, act: Callable) -> None:
        number, members = chunks[index]
        turn = index % 2
        for place, member in enumerate(members):
            buffer, targets = buffers[member].at[row], scratch.target_tiles.at[turn, place]
            count, written = scratch.counts[number, 1], scratch.written.at[turn]
            _copies(act, buffer, targets, scratch.targets, number, count, written, out=True)

    reads(0, _start)
    for index, (number, members) in enumerate(chunks):
        if index + 1 < len(chunks):
            if index:
                writes(index - 1, _wait)  # its place is the next chunk's
            reads(index + 1, _start)
        reads(index, _wait)
        _permute(scratch, number, index % 2, len(members))
        writes(index, _start)
    for index in range(max(len(chunks) - 2, 0), len(chunks)):
        writes(index, _wait)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _plan(path: Any, length: Any, row: Array, scratch: Scratch, number: int, kind: Kind) -> None:
    """List the tiles to read and what moves between them, for the buffers of one kind."""
    tile, most = scratch.source_tiles.shape[4], scratch.sources.shape[1]
    div, rem = jax.lax.div, jax.lax.rem  # `//` and `%` ask for the sign, and all here is positive

    def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        sources, targets, moves, last_source, last_target = carry
        node = path[row * (most + 1) + i]
        source, target = length[row] + node, length[row] + i
        moving = node > i
        if kind.ring:
            source, target = rem(source, kind.slots), rem(target, kind.slots)
        else:
            moving &= source < kind.slots
        source_tile, target_tile = div(source, tile), div(target, tile)
        new_source = moving & (source_tile != last_source)
        new_target = moving & (target_tile != last_target)
        sources += new_source.astype(jnp.int32)
        targets += new_target.astype(jnp.int32)

        @pl.when(moving)
        def _():
            scratch.sources[number, sources - 1] = source_tile
            scratch.targets[number, targets - 1] = target_tile
            new = rem(target, tile)
            shift = rem(new - rem(source, tile) + tile, tile)
            for at, value in enumerate((sources - 1, targets - 1, shift, new)):
                scratch.moves[number, 4 * moves + at] = value

        return (
            sources,
            targets,
            moves + moving.astype(jnp.int32),
            jnp.where(moving, source_tile, last_source),
            jnp.where(moving, target_tile, last_target),
        )

    none = jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(-1), jnp.int32(-1)
    counts = jax.lax.fori_loop(1, most + 1, step, none)[:3]
    for at, value in enumerate(counts):
        scratch.counts[number, at] = value


def _copies(
    act: Callable,
    buffer: Any,
    stage: Any,
    tiles: Any,
    number: int,
    count: Array,
    semaphore: Any,
    out: bool = False,
) -> None:
    """Start, or await, the copies of the listed tiles between one row [K, S, C] and VMEM."""
    tile = stage.shape[2]
    whole, rest = divmod(buffer.shape[1], tile)

    def copy(memory: Any, vmem: Any) -> None:
        act(pltpu.make_async_copy(*((vmem, memory) if out else (memory, vmem)), semaphore))

    def one(index: Array, _: None) -> None:
        at = tiles[number, index]

        @pl.when(at < whole)
        def _():
            copy(buffer.at[:, pl.ds(pl.multiple_of(at * tile, tile), tile)], stage.at[index])

        if rest:

            @pl.when(at == whole)
            def _():
                copy(buffer.at[:, pl.ds(whole * tile, rest)], stage.at[index, :, pl.ds(0, rest)])

    jax.lax.fori_loop(0, count, one, None)


def _permute(scratch: Scratch, number: int, turn: int, buffers: int) -> None:
    """Put the entries of one chunk into their new slots."""
    sources, targets = scratch.source_tiles.at[turn], scratch.target_tiles.at[turn]
    slot = jax.lax.broadcasted_iota(jnp.int32, sources.shape[2:], 1)
    moves = scratch.counts[number, 2]

    def one(index: Array, _: None) -> None:
        place, move = jax.lax.div(index, moves), jax.lax.rem(index, moves)
        source, target, shift, new = (scratch.moves[number, 4 * move + at] for at in range(4))
        # Slots of a tile can be told apart only in 32 bits; both ways are exact.
        moved = pltpu.roll(sources[place, source].astype(jnp.float32), shift, 1)
        kept = targets[place, target]
        merged = jnp.where(slot == new, moved, kept.astype(jnp.float32))
        targets[place, target] = merged.astype(kept.dtype)

    jax.lax.fori_loop(0, buffers * moves, one, None)
