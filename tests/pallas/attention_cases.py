"""Cases of verification attention, for the TPU and the GPU form: a list, and arrays of a case.

Lengths differ from row to row, so a case tries all the edges of a block in one call.
`BLOCK` is the block that the lengths are about.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.layers import visible_slots

BLOCK = 16
seen_slots = jax.jit(visible_slots, static_argnames=("rows", "slots", "window"))  # quicker than step by step


class Case(NamedTuple):
    name: str
    rows: int  # T
    lengths: tuple[int, ...]  # of each sequence
    slots: int  # S
    tree: bool = False  # a random tree, else a chain
    scratch: int | None = None  # R, of which the rows are the last T; None: T
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    window: int | None = None  # the slots are a ring
    softcap: float | None = None
    dtype: str = "float32"  # of the cache
    query_dtype: str | None = None  # None: the cache's

    @property
    def all_scratch(self) -> int:
        return self.scratch or self.rows


def edges(slots: int, scratch: int, block: int = BLOCK) -> tuple[int, ...]:
    """Empty, one entry, about a block's end (the scratch rows' as well), full."""
    full = slots - scratch
    ends = {0, 1, block - 1, block, block + 1, 2 * block - scratch, full}
    return tuple(sorted(n for n in ends if 0 <= n <= full))


def turns(slots: int, window: int) -> tuple[int, ...]:
    """About a window, and about one and several turns of a ring."""
    return tuple(sorted({0, 1, window - 1, window, slots - 2, slots - 1, slots, slots + 1, 5 * slots + 3}))


def _plain(name: str, rows: int, slots: int, scratch: int | None = None, **options) -> Case:
    return Case(name, rows, edges(slots, scratch or rows), slots, scratch=scratch, **options)


def _ring(name: str, rows: int, window: int, slots: int | None = None, **options) -> Case:
    slots = slots or window - 1 + max(rows, 2)
    return Case(name, rows, turns(slots, window), slots, window=window, **options)


CASES = [
    _plain("one row, grouped by three", 1, 72, heads=3),
    _plain("chain of two, wide heads", 2, 72, head_dim=128),
    _plain("chain of five, two kv heads, grouped by four", 5, 72, heads=8, kv_heads=2),
    _plain("tree of eight, grouped by four, soft cap", 8, 64, tree=True, heads=4, softcap=5.0),
    _plain("tree of 33, wide heads", 33, 104, tree=True, head_dim=128),
    _plain("tree of 64", 64, 112, tree=True, heads=3, kv_heads=3),
    _plain("chain of 64", 64, 104),
    _plain("a later pass of a drafter", 4, 72, scratch=13, tree=True, heads=4, kv_heads=2),
    _plain("the last of 64 scratch rows", 1, 104, scratch=64, tree=True),
    _plain("bfloat16 tree, float32 rows", 8, 72, tree=True, dtype="bfloat16", query_dtype="float32"),
    _plain("one block, bfloat16 chain", 5, 13, heads=4, head_dim=128, dtype="bfloat16"),
    _ring("a ring smaller than a block", 5, 6),
    _ring("one row in a ring", 1, 7),
    _ring("a tree in a ring of three blocks, soft cap", 8, 33, tree=True, heads=4, softcap=3.0),
    _ring("a ring longer than its window", 3, 9, slots=72, heads=4, kv_heads=2),
    _ring("a tree deeper than its window, wide heads", 12, 3, slots=40, tree=True, head_dim=128),
]

PRODUCT = [
    _plain(f"{rows} rows, tree {tree}, group {group}, cap {cap}, {dtype}", rows, rows + 40, tree=tree,
           heads=group, softcap=cap, dtype=dtype, head_dim=head_dim)
    for rows in (1, 2, 5, 8, 33, 64)
    for tree in (False, True)
    for group, cap, dtype, head_dim in (
        (1, None, "float32", 128), (3, 2.0, "float32", 8),
        (4, None, "float32", 8), (4, None, "bfloat16", 128))
] + [
    _ring(f"{rows} rows, window {window}, tree {tree}, slots {slots}", rows, window, slots=slots, tree=tree)
    for rows in (1, 8)
    for window in (1, 15, 16, 17, 40)
    for tree in (False, True)
    for slots in (None, window - 1 + rows + 30)
]  # fmt: skip


class Arrays(NamedTuple):
    """Arguments of ``attend``; what is neither committed nor scratch holds NaN."""

    query: jnp.ndarray  # [B, T, H, C]
    keys: jnp.ndarray  # [B, K, S, C]
    values: jnp.ndarray
    length: jnp.ndarray  # [B]
    mask: jnp.ndarray | None  # [B, T, R]
    depth: jnp.ndarray  # [B, T]


def arrays(case: Case, unseen: float = np.nan, seed: int = 0) -> Arrays:
    """Random arrays of a case; each sequence has a tree of its own."""
    rng = np.random.default_rng(seed)
    batch, scratch = len(case.lengths), case.all_scratch
    query = rng.standard_normal((batch, case.rows, case.heads, case.head_dim))
    cache = rng.standard_normal((2, batch, case.kv_heads, case.slots, case.head_dim))
    mask = np.stack([ancestors(rng, scratch) for _ in range(batch)]) if case.tree else None
    depth = np.broadcast_to(np.arange(scratch), (batch, scratch)) if mask is None else mask.sum(-1) - 1
    depth = jnp.asarray(depth[:, scratch - case.rows :], jnp.int32)
    mask = None if mask is None else jnp.asarray(mask[:, scratch - case.rows :])
    length = jnp.asarray(case.lengths, jnp.int32)
    seen = seen_slots(length, case.rows, case.slots, mask, case.window, depth).any(axis=1)
    node = np.arange(case.slots) - np.asarray(length)[:, None]
    written = (node >= 0) & (node < scratch)  # on no path, perhaps, of these rows
    cache = np.where((np.asarray(seen) | written)[:, None, :, None], cache, unseen)
    keys, values = jnp.asarray(cache, case.dtype)
    return Arrays(jnp.asarray(query, case.query_dtype or case.dtype), keys, values, length, mask, depth)


class BadKeys(NamedTuple):
    """Keys of which some are NaN, and the rows that see one of these."""

    keys: jnp.ndarray
    rows: np.ndarray  # [B, T]


def with_bad_keys(case: Case, given: Arrays) -> BadKeys:
    """NaN in all slots that no row sees and in one that some rows see: a draft, a slot that leaves the
    window; in the last sequence in a committed one."""
    seen = np.asarray(seen_slots(given.length, case.rows, case.slots, given.mask, case.window, given.depth))
    bad = ~seen.any(axis=1)
    some = seen.any(axis=1) & ~seen.all(axis=1)
    for row, length in enumerate(case.lengths):
        if row == len(case.lengths) - 1 and length:
            bad[row, (length - 1) % case.slots] = True
        elif some[row].any():
            choices = np.flatnonzero(some[row])
            bad[row, choices[row % len(choices)]] = True
    keys = jnp.where(bad[:, None, :, None], jnp.nan, given.keys)
    return BadKeys(keys, np.any(seen & bad[:, None, :], axis=-1))


def ancestors(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """The mask [N, N] of a random tree, deep in some parts, with an unused node that sees itself alone."""
    mask = np.eye(nodes, dtype=bool)
    unused = rng.integers(1, nodes + 1)
    for node in range(1, nodes):
        if node != unused:
            mask[node] |= mask[rng.integers(max(0, node - 4), node)]
    return mask


def options(case: Case, given: Arrays) -> dict:
    """What ``attend`` takes by keyword, as the decoder gives it."""
    window = {} if case.window is None else dict(window=case.window, depth=given.depth)
    return window if case.softcap is None else window | dict(softcap=case.softcap)


def examples() -> list[tuple[str, tuple, dict]]:
    """What a chip should compile: a name, the abstract arguments of ``attend`` up to the mask, the others."""

    def example(name, batch=1, rows=8, group=4, head_dim=128, slots=8192, kv_heads=8, dtype="bfloat16",
                tree=True, scratch=None, query_dtype=None, **options):  # fmt: skip
        shape = jax.ShapeDtypeStruct
        cache = shape((batch, kv_heads, slots, head_dim), dtype)
        mask = shape((batch, rows, scratch or rows), "bool") if tree else None
        query = shape((batch, rows, kv_heads * group, head_dim), query_dtype or dtype)
        return name, (query, cache, cache, shape((batch,), "int32"), mask), dict(scale=0.1, **options)

    return [
        *(
            example(f"B {batch}, C {head_dim}, {dtype}", batch, head_dim=head_dim, dtype=dtype)
            for batch in (1, 8)
            for head_dim in (64, 128)
            for dtype in ("float32", "bfloat16")
        ),
        example("one row", rows=1, tree=False),
        example("64 nodes x 8 heads", rows=64, group=8),
        example(
            "64 nodes x 8 heads, head_dim 256, float32",
            rows=64,
            group=8,
            head_dim=256,
            kv_heads=2,
            dtype="float32",
        ),
        example("a prompt of 512", rows=512, tree=False),
        example("a later pass of a drafter", rows=3, group=3, scratch=16),
        example("float32 rows, bfloat16 cache", query_dtype="float32"),
        example("a ring", head_dim=256, kv_heads=1, slots=520, rows=8, tree=False, window=512, softcap=50.0),
        example("odd slots", head_dim=64, slots=575, rows=5, group=3),
        example("one kv head in two splits", kv_heads=1, group=8, splits=2),
    ]
