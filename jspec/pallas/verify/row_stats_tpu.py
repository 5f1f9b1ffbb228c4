"""`jspec.pallas.verify.reference.row_stats_ref` on TPU: every logit once from HBM, the thresholds in VMEM.

The rows of all sequences are one array [B·N, V], whose tiles are full whatever N is. Grid
(⌈B·N/8⌉,), parallel; a block is 8 rows, [8, V], which are whole tiles (or B·N, if that is less).
While the next block comes in, this one is swept in pieces of [8, `LANES`]. Each lane keeps the
sum of exp relative to its greatest logit so far, that logit's first id and, if any row of the
block uses top-k, top-p or min-p, its `KEPT` greatest logits, for `jspec.pallas.verify.thresholds`.
No row is sorted; a block is swept again, in VMEM, only where a threshold lies below what lanes kept.

HBM: B · N · V logits, and 16 bytes a row out. VMEM: two blocks. Limit: reading; with thresholds some
30 operations a logit, estimated at 10 µs a block of 8 x 128 k, and 5 µs a block for each search.

Static: all shapes. Traced: the logits and the settings.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.verify import thresholds
from jspec.pallas.verify.reference import RowStats
from jspec.pallas.verify.thresholds import Limits, Rows
from jspec.types import Policy

LANES = 512
"""Ids of one piece of a sweep, lanes of a row."""

KEPT = 8
"""Logits that a lane keeps. Of 600 ids eight share one of 512 lanes in one row of 23, of 50 hardly ever."""

VMEM = 100 * 2**20
"""Bytes that blocks may take; a v5e has 128 MiB."""


def row_stats_tpu(policy: Policy, x: Float[Array, "B N V"], *, interpret: Any = False) -> RowStats:
    """`jspec.pallas.verify.reference.row_stats_ref`, but for the order in which sums are rounded.

    Raises:
        JspecError: logits that are not float32 or bfloat16, or a vocabulary too large for VMEM.
    """
    batch, nodes, vocab = x.shape
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise JspecError(f"logits are {x.dtype}; the kernel takes float32 and bfloat16")
    rows = min(batch * nodes, 8)
    needed = 2 * rows * vocab * x.dtype.itemsize
    if needed > VMEM:
        raise JspecError(
            f"a block of {rows} rows of {vocab} logits takes {needed >> 20} MiB of VMEM, "
            f"more than {VMEM >> 20}"
        )
    blocks = pl.cdiv(batch * nodes, rows)
    each = jnp.stack([part.astype(jnp.float32) for part in thresholds.limits(policy, vocab)], axis=1)
    # Whatever lies behind the last row asks for nothing.
    none = jnp.broadcast_to(jnp.array([1, 0, 1, -jnp.inf], jnp.float32), (blocks * rows - batch * nodes, 4))
    settings = jnp.concatenate([jnp.repeat(each, nodes, axis=0), none])
    place = pl.BlockSpec((rows, 1), lambda i: (i, 0))
    result = pl.pallas_call(
        functools.partial(_body, vocab=vocab),
        grid=(blocks,),
        in_specs=[
            pl.BlockSpec((rows, len(Limits._fields)), lambda i: (i, 0)),
            pl.BlockSpec((rows, vocab), lambda i: (i, 0)),
        ],
        out_specs=[place] * 4,
        out_shape=[
            jax.ShapeDtypeStruct((batch * nodes, 1), dtype) for dtype in [jnp.float32] * 3 + [jnp.int32]
        ],
        scratch_shapes=[pltpu.VMEM((rows, LANES), jnp.float32)],
        compiler_params=compat.tpu_params("parallel", vmem_limit_bytes=needed + 2**24),
        interpret=interpret,
        name="row_stats",
    )(settings, x.reshape(batch * nodes, vocab))
    return RowStats(*(part.reshape(batch, nodes) for part in result))


def _body(settings_ref, x_ref, top_ref, cut_ref, total_ref, best_ref, rest_ref, *, vocab):
    whole, rest = vocab // LANES, vocab % LANES
    shape = x_ref.shape[0], LANES
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    if rest:  # the ids behind the last whole piece
        rest_ref[...] = jnp.full(shape, -jnp.inf, jnp.float32)
        rest_ref[:, :rest] = x_ref[:, pl.ds(whole * LANES, rest)].astype(jnp.float32)

    def fold(visit, start):
        def piece(i, state):
            first = pl.multiple_of(i * LANES, LANES)
            return visit(thresholds.clean(x_ref[:, pl.ds(first, LANES)]), first + lane, state)

        state = lax.fori_loop(0, whole, piece, start) if whole else start
        return visit(thresholds.clean(rest_ref[...]), whole * LANES + lane, state) if rest else state

    rows = Rows(
        vocab=vocab,
        bits=8 * x_ref.dtype.itemsize,
        shape=shape,
        fold=fold,
        together=lambda vectors: jnp.concatenate(vectors, axis=1),
        total=lambda vector: jnp.sum(vector, axis=1, keepdims=True),
        highest=lambda vector: jnp.max(vector, axis=1, keepdims=True),
        lowest=lambda vector: jnp.min(vector, axis=1, keepdims=True),
        any=lambda flags: jnp.max(jnp.where(flags, 1.0, 0.0)) > 0,
        single=lambda convert, number: convert(number),
    )
    own = Limits(*(settings_ref[:, pl.ds(i, 1)] for i in range(4)))
    stats, _ = thresholds.row_stats(rows, own, own.cut, KEPT)
    for ref, value in zip((top_ref, cut_ref, total_ref, best_ref), stats, strict=True):
        ref[...] = value
