"""`jspec.pallas.law.summarise_ref` on TPU: every logit once from HBM, the thresholds in VMEM.

The rows of all sequences are one array [B·N, V], whose tiles are full whatever N is. Grid
(⌈B·N/8⌉,), parallel; a block is 8 rows, [8, V], which are whole tiles (or B·N, if that is less).
While the next block comes in, this one is swept in pieces of [8, `LANES`]: once for top and best;
32 times for the k-th greatest, if any of its rows uses top-k; once to keep the weights in VMEM and
32 times over them, if any uses top-p; once for the total. A search sets one bit of the threshold a
sweep, from the highest (`jspec.sampling.truncate`), so no row is sorted.

HBM: B · N · V logits, and 16 bytes a row out. VMEM: two blocks and one of weights. Without
top-k and top-p reading is the limit, with them the sweeps are (estimated at 0.1 ms a block
of 8 x 128 k; a block whose rows do not ask for them takes none).

Static: all shapes. Traced: the logits and the settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.law import Summary
from jspec.sampling.policy import Policy

LANES = 2048
"""Ids of one piece of a sweep."""

VMEM = 100 * 2**20
"""Bytes that blocks and weights may take; a v5e has 128 MiB."""

LOWEST = -(2**31)
BELOW_ALL = LOWEST + 2**23 - 1
"""The place of -inf in the order of the floats' bits; all below it are NaN."""


def summarise(policy: Policy, x: Float[Array, "B N V"], *, interpret: Any = False) -> Summary:
    """`summarise_ref`, but for the order in which sums are rounded.

    Raises:
        JspecError: logits that are not float32 or bfloat16, or a vocabulary too large for VMEM.
    """
    batch, nodes, vocab = x.shape
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise JspecError(f"logits are {x.dtype}; the kernel takes float32 and bfloat16")
    rows = min(batch * nodes, 8)
    needed = rows * vocab * (2 * x.dtype.itemsize + 4)
    if needed > VMEM:
        raise JspecError(
            f"a block of {rows} rows of {vocab} logits takes {needed >> 20} MiB of VMEM, "
            f"more than {VMEM >> 20}"
        )
    warm = policy.temperature > 0
    temperature = jnp.where(warm, jnp.minimum(policy.temperature, 1e30), 1.0)
    top_k, top_p = jnp.where(warm, policy.top_k, 0), jnp.where(warm, policy.top_p, 1.0)
    each = jnp.stack([temperature, jnp.minimum(top_k, vocab), top_p, jnp.log(policy.min_p)], axis=1)
    settings = jnp.repeat(each.astype(jnp.float32), nodes, axis=0)
    place = pl.BlockSpec((rows, 1), lambda i: (i, 0))
    result = pl.pallas_call(
        functools.partial(_body, vocab=vocab),
        grid=(pl.cdiv(batch * nodes, rows),),
        in_specs=[
            pl.BlockSpec((rows, 4), lambda i: (i, 0)),
            pl.BlockSpec((rows, vocab), lambda i: (i, 0)),
        ],
        out_specs=[place] * 4,
        out_shape=[
            jax.ShapeDtypeStruct((batch * nodes, 1), dtype) for dtype in [jnp.float32] * 3 + [jnp.int32]
        ],
        scratch_shapes=[pltpu.VMEM((rows, vocab), jnp.float32)],
        compiler_params=compat.tpu_params("parallel", vmem_limit_bytes=VMEM + 2**24),
        interpret=interpret,
        name="summarise",
    )(settings, x.reshape(batch * nodes, vocab))
    return Summary(*(part.reshape(batch, nodes) for part in result))


def sweep(vocab: int, visit: Callable[[Any, int, Any], Any], start: Any, trips: Any = None) -> Any:
    """Fold ``visit(first id, ids, carry)`` over the vocabulary in pieces, the last one shorter.

    ``trips``: 1 or 0, traced: 0 leaves ``start`` as it is.
    """
    whole = vocab // LANES

    def piece(i, carry):
        return visit(pl.multiple_of(i * LANES, LANES), LANES, carry)

    on = 1 if trips is None else trips
    carry = jax.lax.fori_loop(0, whole * on, piece, start) if whole else start
    if vocab % LANES:
        carry = jax.lax.fori_loop(0, on, lambda _, carry: visit(whole * LANES, vocab % LANES, carry), carry)
    return carry


def as_float(place: Array) -> Array:
    """The float at a place in the order of floats, as `jspec.sampling.truncate` has it."""
    bits = jnp.where(place < 0, place ^ jnp.int32(2**31 - 1), place)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _body(settings_ref, x_ref, top_ref, cut_ref, total_ref, best_ref, weight_ref, *, vocab):
    rows = x_ref.shape[0]
    temperature, k, top_p, log_min_p = (settings_ref[:, pl.ds(i, 1)] for i in range(4))
    column = jnp.zeros((rows, 1), jnp.float32)

    def logits(first, ids):
        return x_ref[:, pl.ds(first, ids)].astype(jnp.float32)

    def greatest(first, ids, carry):
        top, best = carry
        piece = logits(first, ids)
        piece = jnp.where(jnp.isnan(piece), jnp.inf, piece)
        here = jnp.max(piece, axis=1, keepdims=True)
        index = jax.lax.broadcasted_iota(jnp.int32, piece.shape, 1) + first
        at = jnp.min(jnp.where(piece == here, index, vocab), axis=1, keepdims=True)
        return jnp.maximum(top, here), jnp.where(here > top, at, best)

    top, best = sweep(vocab, greatest, (column - jnp.inf, jnp.zeros((rows, 1), jnp.int32)))
    good = (top > -jnp.inf) & (top < jnp.inf)
    top = jnp.where(good, top, jnp.nan)

    def search(amount, need, on):
        """The greatest float at and above which lies at least ``need``."""

        def bit(step, place):
            higher = place ^ jax.lax.shift_right_logical(jnp.int32(LOWEST), step)
            limit = as_float(higher)
            found = sweep(vocab, lambda first, ids, sum: sum + amount(first, ids, limit), column)
            return jnp.where((found >= need) | (higher <= BELOW_ALL), higher, place)

        lowest = jnp.full((rows, 1), LOWEST, jnp.int32)
        place = jax.lax.fori_loop(0, 32 * on, bit, lowest)
        return jnp.where(on > 0, as_float(place), -jnp.inf)

    def count(first, ids, limit):
        return jnp.sum(jnp.where(logits(first, ids) >= limit, 1.0, 0.0), axis=1, keepdims=True)

    def used(rows):
        return (jnp.max(jnp.where(rows, 1.0, 0.0)) > 0).astype(jnp.int32)

    kth = search(count, jnp.where(k > 0, k, vocab), used(k > 0))
    cut = jnp.where(k > 0, kth, -jnp.inf)

    def scaled(first, ids):
        return (logits(first, ids) - top) / temperature

    def weigh(first, ids, whole):
        weight = jnp.where(logits(first, ids) < cut, 0.0, jnp.exp(scaled(first, ids)))
        weight_ref[:, pl.ds(first, ids)] = weight
        return whole + jnp.sum(weight, axis=1, keepdims=True)

    def mass(first, ids, limit):
        weight = weight_ref[:, pl.ds(first, ids)]
        return jnp.sum(jnp.where(logits(first, ids) >= limit, weight, 0.0), axis=1, keepdims=True)

    nucleus = used(top_p < 1)
    whole = sweep(vocab, weigh, column, nucleus)
    need = jnp.maximum(top_p * whole, jnp.finfo(jnp.float32).tiny)
    new = search(mass, need, nucleus)
    cut = jnp.where((top_p < 1) & (new > cut), new, cut)

    def add(first, ids, sum):
        out = (logits(first, ids) < cut) | (scaled(first, ids) < log_min_p)
        return sum + jnp.sum(jnp.where(out, 0.0, jnp.exp(scaled(first, ids))), axis=1, keepdims=True)

    top_ref[...], cut_ref[...] = top, cut
    total_ref[...] = jnp.log(sweep(vocab, add, column))
    best_ref[...] = jnp.where(good, best, 0)
