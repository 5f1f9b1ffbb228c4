"""The first pass of fused verification on Hopper GPUs: a row of logits to the numbers of its distribution.

`jspec.pallas.verify.reference.row_stats_ref` says what comes out. One kernel, grid (N, B): a program
is one row, which `GROUPS` warpgroups take in turn, a piece of ``span`` ids each. So there are
groups x span lanes, a few to a thread; each sees one id of every round and keeps, in registers,

* the sum of exp relative to the greatest logit so far, and that logit's first id;
* where its sequence uses top-k, top-p or min-p, the `KEPT` greatest logits, for
  `jspec.pallas.verify.thresholds`.

So **each logit is read once**, whatever the vocabulary, but for rows with a threshold below what
lanes kept, which are swept again, from the L2 cache (50 MB) while the logits fit.
`row_stats_and_sweeps` tells how many sweeps each row took.

What limits it: some 30 operations a logit on the row's own multiprocessor, and reading.
Static: the shape, the dtype, ``span`` and ``groups``; traced: the logits and all settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jspec.pallas import compat
from jspec.pallas.verify import thresholds
from jspec.pallas.verify.reference import RowStats
from jspec.pallas.verify.rows_gpu import LANES, check, slices, widen, window
from jspec.pallas.verify.thresholds import Limits, Rows
from jspec.types import Policy

GROUPS = 4
"""Warpgroups of a row."""

KEPT = 6
"""Logits that a lane keeps. Of 1000 ids six share one of 2048 lanes in one row of 26, of 50 hardly ever."""


def row_stats_gpu(policy: Policy, x: Float[Array, "B N V"], **options: Any) -> RowStats:
    """`jspec.pallas.verify.reference.row_stats_ref` as a kernel.

    The options are those of `row_stats_and_sweeps`.

    Raises:
        JspecError: logits that are neither float32 nor bfloat16, or 2**24 ids or more.
    """
    return row_stats_and_sweeps(policy, x, **options)[0]


def row_stats_and_sweeps(
    policy: Policy, x: Float[Array, "B N V"], *, span: int = 512, groups: int = 0, interpret: Any = False
) -> tuple[RowStats, Int[Array, "B N"]]:
    """The same, and how many sweeps read each row. ``span``, a multiple of 128: ids of a piece."""
    groups = groups or (2 if interpret else GROUPS)  # simulated ones need a processor each
    check(x, "logits")
    vocab, x = x.shape[-1], widen(x)
    span, (batch, nodes, _) = slices(x, span), x.shape
    limits = thresholds.limits(policy, vocab)
    dtypes = jnp.float32, jnp.float32, jnp.float32, jnp.int32, jnp.int32
    *stats, sweeps = compat.gpu_kernel(
        functools.partial(_body, vocab=vocab, span=span),
        out_type=tuple(jax.ShapeDtypeStruct((batch, nodes), dtype) for dtype in dtypes),
        grid=(nodes, batch),
        grid_names=("node", "row"),
        num_threads=groups,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((groups, KEPT * span), jnp.float32),
            plgpu.SMEM((groups,), jnp.float32),
            plgpu.Barrier(num_arrivals=groups),
        ],
        interpret=interpret,
    )(x, *limits, limits.cut.astype(jnp.int32))
    return RowStats(*stats), sweeps


def _body(x, scale, top_k, top_p, low, cuts, *refs, vocab, span):
    *outs, kept, shared, met = refs
    node, row = lax.axis_index("node"), lax.axis_index("row")
    rows = _rows(x.at[row, node], kept, shared, met, vocab, span)
    limits = Limits(scale[row], top_k[row], top_p[row], low[row])
    stats, sweeps = thresholds.row_stats(rows, limits, cuts[row] == 1, KEPT)

    @pl.when(lax.axis_index("group") == 0)
    def _():
        for out, value in zip(outs, (*stats, sweeps), strict=True):
            out[row, node] = value


def _rows(x: Any, kept: Any, shared: Any, met: Any, vocab: int, span: int) -> Rows:
    """One row, as one of its warpgroups has it; their numbers meet in shared memory."""
    group, groups, (width,) = lax.axis_index("group"), shared.shape[0], x.shape

    def fold(visit: Callable[..., Any], start: Any) -> Any:
        def piece(i: Array, state: Any) -> Any:
            first, ids, own = window(width, span, group + i * groups)
            values = thresholds.clean(x[pl.ds(first, span)])
            return visit(jnp.where(own, values, -jnp.inf), ids, state)

        return lax.fori_loop(0, (pl.cdiv(width, span) - group + groups - 1) // groups, piece, start)

    def join(operation: Callable[[Array, Array], Array], number: Array) -> Array:
        shared[group] = number
        _meet(met)
        joined = functools.reduce(operation, [shared[other] for other in range(groups)])
        _meet(met)  # before the next number comes
        return joined

    def together(vectors: Sequence[Array]) -> Array:
        """By way of shared memory: few operations, since the compiler takes their square of time."""
        for i, vector in enumerate(vectors):
            kept[group, pl.ds(i * span, span)] = vector
        _meet(met)
        return kept[group]

    return Rows(
        vocab=vocab,
        bits=8 * x.dtype.itemsize,
        shape=(span,),
        fold=fold,
        together=together,
        total=lambda vector: join(jnp.add, jnp.sum(vector)),
        highest=lambda vector: join(jnp.maximum, jnp.max(vector)),
        lowest=lambda ids: join(jnp.minimum, jnp.min(ids).astype(jnp.float32)).astype(jnp.int32),
        any=lambda flag: flag,
        single=_single,
    )


def _meet(met: Any) -> None:
    """Wait for the row's other warpgroups."""
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


def _single(convert: Callable[[Array], Array], number: Array) -> Array:
    """Mosaic GPU takes only vectors for another type."""
    return jnp.max(convert(jnp.full((LANES,), number)))
