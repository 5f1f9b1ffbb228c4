"""The commit of an accepted path on Hopper GPUs: the entries of all layers move in one call, in place.

`jspec.pallas.commit.reference` says what moves. Grid (2 L, B): a program is one warpgroup and moves
one row of one buffer [B, K, S, C], which stays in global memory and is aliased with its
result. One TMA copy brings an entry, all its heads at once, into shared memory [P - 1, K, C],
another takes it to its new slot; each has a barrier of its own. So each moving entry is read
once and written once and nothing else is touched. Static: L, B, K, S, C, P and which layers
are rings; traced: path and length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jspec.cache.dense import Entry
from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.commit.reference import check

SHARED = 227 << 10
"""Bytes of shared memory that a block may have."""

MAX_BARRIERS = 32
"""Barriers that Mosaic GPU puts into one group; each entry that moves has its own."""


def compact_gpu(
    layers: tuple[Entry, ...],
    path: Int[Array, "B P"],
    length: Int[Array, "B"],
    wraps: Sequence[bool] = (),
    *,
    interpret: Any = False,
) -> tuple[Entry, ...]:
    """Do what `jspec.cache.dense.compact` does to the accepted nodes; every other slot keeps its bits.

    Raises:
        JspecError: a cache that is neither float32 nor bfloat16, layers of different
            heads or dtypes, more than 256 heads or a head_dim above 256, heads that are no
            multiple of 16 bytes or entries of 128, a path of more than 33 nodes, or one
            that does not fit into shared memory.
    """
    batch, paths = path.shape
    check(layers, ["float32", "bfloat16"])
    if paths == 1:  # the root alone, which stays
        return layers
    rings = tuple(wraps) or (False,) * len(layers)
    buffers = jax.tree.leaves(tuple(layers))
    _, heads, _, head_dim = buffers[0].shape
    _check_copies(paths, heads, head_dim, buffers[0].dtype)
    refs = [jax.new_ref(buffer, memory_space=plgpu.GMEM) for buffer in buffers]
    compat.gpu_in_place(
        functools.partial(_kernel, rings=[ring for ring in rings for _ in range(2)]),
        grid=(len(buffers), batch),
        grid_names=("buffer", "row"),
        scratch_types=(
            plgpu.SMEM((paths - 1, heads, head_dim), buffers[0].dtype),
            plgpu.Barrier(num_barriers=paths - 1),
        ),
        interpret=interpret,
    )(path.astype(jnp.int32), length.astype(jnp.int32), *refs)
    moved = iter(jax.freeze(ref) for ref in refs)
    return tuple(Entry(next(moved), next(moved)) for _ in layers)


def _check_copies(paths: int, heads: int, head_dim: int, dtype: Any) -> None:
    """Raise JspecError for entries that the copies cannot take."""
    one = heads * head_dim * dtype.itemsize
    if max(heads, head_dim) > 256 or head_dim * dtype.itemsize % 16 or one % 128:
        raise JspecError(
            "the commit kernel takes up to 256 heads and head_dim up to 256, heads of a multiple of 16 bytes "
            f"and entries of a multiple of 128, not {heads} heads of head_dim {head_dim} in {dtype}"
        )
    if paths - 1 > MAX_BARRIERS:
        raise JspecError(
            f"the commit kernel takes paths of up to {MAX_BARRIERS + 1} nodes, the root included, not {paths}"
        )
    size = (paths - 1) * (one + 8)  # and a barrier
    if size > SHARED:
        raise JspecError(
            f"the commit kernel has {SHARED} bytes of shared memory, but the entries of "
            f"a path of {paths} nodes, {heads} heads and head_dim {head_dim} take {size}"
        )


def _kernel(path, length, *refs, rings: Sequence[bool]) -> None:
    """One row of one buffer."""
    buffers, staged, barriers = refs[: len(rings)], *refs[len(rings) :]
    row = jax.lax.axis_index("row")

    def of(buffer: Any, ring: bool) -> Callable[[], None]:
        return lambda: _move(buffer, path, length[row], row, staged, barriers, ring)

    jax.lax.switch(jax.lax.axis_index("buffer"), [of(*pair) for pair in zip(buffers, rings, strict=True)])


def _move(buffer: Any, path: Any, length: Array, row: Array, staged: Any, barriers: Any, ring: bool) -> None:
    slots = buffer.shape[2]

    def slot(node: Array) -> Array:
        return jax.lax.rem(length + node, slots) if ring else length + node

    def each(act: Callable[[Array, Array], None]) -> None:
        """Do something for every entry that moves, in the order of the path."""

        def step(i: Array, carry: None) -> None:
            node = path[row, i]

            @pl.when((node > i) & (ring | (length + node < slots)))
            def _():
                act(i, node)

        jax.lax.fori_loop(1, path.shape[1], step, None)

    def read(i: Array, node: Array) -> None:
        plgpu.copy_gmem_to_smem(buffer.at[row, :, slot(node)], staged.at[i - 1], barriers.at[i - 1])

    def write(i: Array, node: Array) -> None:
        plgpu.copy_smem_to_gmem(staged.at[i - 1], buffer.at[row, :, slot(i)])

    each(read)
    each(lambda i, _: plgpu.barrier_wait(barriers.at[i - 1]))
    plgpu.commit_smem()  # what follows comes after what was waited for, for the copies too
    each(write)
    plgpu.wait_smem_to_gmem(0)
