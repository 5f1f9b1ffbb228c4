"""The distribution of rows of which each shard has a slice of the vocabulary, under `jax.shard_map`.

top-k and top-p cut at a threshold. It is found digit by digit of the order-preserving
integer of the float (`jspec.sampling.truncate` finds it bit by bit): a histogram, summed
over the shards, counts or weighs the logits that share the digits found so far, so an
exchange finds 11 bits.

| step | top-k, float32 | top-p, float32 | both, bfloat16 |
|---|---|---|---|
| 1 | counts, 11 bits, and the greatest logit | | counts, 8 bits |
| 2 | counts, 10 bits | weights, 10 bits | counts and weights, 8 bits: top-k is found |
| 3 | counts, 11 bits: found | | weights, 8 bits: top-p is found |
| 4, 5 | | weights, 11 and 11 bits: found | |

Counts are int32, weights float32; they are separate sums of at most 2048 numbers of 4
bytes a row of logits: 64 kB a sequence of N <= 8 rows, in proportion for larger trees.
Where no sequence uses top-k or top-p there is no histogram.

A histogram is a product of two one-hot matrices, of a digit's high and low bits, in
pieces of the vocabulary (``PIECE``): a matrix unit's work on TPU and GPU, where scattered
additions are slow or, in floats, come in any order. Its operands are exact in bfloat16
(a weight as the sum of three), so one pass of the fastest kind of product is exact up to
the float32 sums, and equal in every run. The pieces are its temporaries: B * N * PIECE
rows of at most 160 numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.pallas.verify.reference import RowStats
from jspec.sampling import truncate
from jspec.sampling.truncate import any_of
from jspec.types import Policy

PIECE = 512
"""Ids that a histogram takes at a time."""

LOW = 5
"""Bits of a digit in the narrow one of the two one-hot matrices."""

COUNTS = {16: (8, 8), 32: (11, 10, 11)}
WEIGHTS = {16: (8, 8), 32: (10, 11, 11)}
"""Bits found a step, of floats of 16 and of 32 bits. Counts and first weights share step 2."""


class Slice(NamedTuple):
    """A shard's part of the vocabulary."""

    axis: str
    shards: int
    first: Int[Array, ""]  # its first id
    width: int  # the number of its ids

    @property
    def vocab(self) -> int:
        return self.width * self.shards


def greatest(part: Slice, x: Float[Array, "B N W"]) -> Float[Array, "B N"]:
    """Of whole rows; +inf where there is a NaN, which a maximum may overlook."""
    x = x.astype(jnp.float32)
    return jax.lax.pmax(jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=-1), part.axis)


def stats_and_entries(
    part: Slice, policy: Policy, x: Float[Array, "B N W"], entries: Callable[[], Any] = lambda: None
) -> tuple[RowStats, Any]:
    """The distribution of each row (`jspec.pallas.verify.reference.row_stats_ref`) from a slice of it,
    under `jax.shard_map`; and ``entries()``, whose own exchange is part of the first step.

    The cut by top-k is exact, that by top-p is up to the rounding of the weights' sums.
    """
    if x.dtype != jnp.bfloat16:
        x = x.astype(jnp.float32)
    sampled = policy.temperature > 0
    by_count = any_of(sampled & (policy.top_k > 0))
    by_weight = any_of(sampled & (policy.top_p < 1))

    # Whole branches, entries too: XLA's CPU code confuses collectives that run beside a
    # conditional with those in it. Within a branch no collective is in a conditional.
    def truncated() -> tuple[RowStats, Any]:
        result = _truncated(part, policy, x, by_count, by_weight), entries()
        # Else XLA finds the same exchange in both branches and makes it after them, a step more.
        return jax.lax.optimization_barrier(result)

    def whole() -> tuple[RowStats, Any]:
        top = _top(part, x)
        total = jax.lax.psum(_total(policy, x, top), part.axis)
        return _stats(top, jnp.full_like(top, -jnp.inf), total, _best(part, x, top)), entries()

    return jax.lax.cond(by_count | by_weight, truncated, whole)


def _stats(top: Array, cut: Array, total: Array, best: Array) -> RowStats:
    return RowStats(top[..., 0], cut[..., 0], jnp.log(total)[..., 0], best)


def _top(part: Slice, x: Array) -> Float[Array, "B N 1"]:
    top = greatest(part, x)
    return jnp.where(jnp.isfinite(top), top, jnp.nan)[..., None]


def _best(part: Slice, x: Array, top: Array) -> Int[Array, "B N"]:
    index = part.first + jnp.arange(part.width)
    best = jax.lax.pmin(jnp.min(jnp.where(x == top, index, part.vocab), axis=-1), part.axis)
    return jnp.where(best < part.vocab, best, 0)


def _weight(policy: Policy, x: Array, top: Array) -> Float[Array, "..."]:
    return jnp.exp(truncate.scale(policy, x.astype(jnp.float32), top))


def _total(policy: Policy, x: Array, top: Array) -> Float[Array, "B N 1"]:
    """What min-p keeps of the slice."""
    kept = truncate.kept(policy, x.astype(jnp.float32), top, jnp.full_like(top, -jnp.inf), 0.0)
    return jnp.sum(jnp.exp(kept), axis=-1, keepdims=True)


def _truncated(part: Slice, policy: Policy, x: Array, by_count: Array, by_weight: Array) -> RowStats:
    """Top-k's threshold and then, of the mass that it left, top-p's."""
    bits = jnp.finfo(x.dtype).bits
    take = functools.partial(_histogram, part, x)
    everything = jnp.zeros((*x.shape[:2], 1), jnp.uint32)
    counts = take(by_count, bits, COUNTS[bits][0], everything, None)
    counts = jax.lax.psum(counts.astype(jnp.int32), part.axis)  # step 1
    top = _top(part, x)
    best = _best(part, x, top)

    def weight(x: Array) -> Array:
        return _weight(policy, x, top)

    weights = take(by_weight, bits, WEIGHTS[bits][0], everything, weight)
    # One exchange: XLA may join sums that wait for nothing, but must not make a wide one wider.
    both = jnp.concatenate([_total(policy, x, top), weights], axis=-1)
    total, weights = jnp.split(jax.lax.psum(both, part.axis), [1], axis=-1)  # step 2

    cut, mass = _kthgreatest(part, policy, x, weight, counts, functools.partial(take, by_count))
    cut, mass = jnp.where(by_count, cut, -jnp.inf), jnp.where(by_count, mass, jnp.inf)
    new, new_mass = _nucleus(part, policy, x, weight, weights, cut, mass, functools.partial(take, by_weight))
    cut, mass = jnp.where(by_weight, new, cut), jnp.where(by_weight, new_mass, mass)
    # What min-p keeps and what top-k and top-p keep are each all from some logit on, so one
    # lies within the other, and what both keep weighs the lesser of the two.
    return _stats(top, cut, jnp.minimum(total, mass), best)


def _kthgreatest(
    part: Slice, policy: Policy, x: Array, weight: Callable, counts: Array, take: Callable[..., Array]
) -> tuple[Float[Array, "B N 1"], Float[Array, "B N 1"]]:
    """The logit that top-k cuts at, from the first digit's counts; and the weight from it on."""
    bits = jnp.finfo(x.dtype).bits
    left, widths = bits - COUNTS[bits][0], COUNTS[bits][1:]
    k = truncate.each(jnp.where(policy.top_k > 0, jnp.minimum(policy.top_k, part.vocab), part.vocab))
    digit, above = _digit(counts, k, jnp.zeros_like(k))
    prefix = digit.astype(jnp.uint32)
    for width in widths:
        group = prefix
        counts = jax.lax.psum(take(left, width, group, None).astype(jnp.int32), part.axis)
        digit, above = _digit(counts, k, above)
        prefix, left = _append(group, digit, width), left - width
    greater = jnp.where((_ordered(x) >> width) > group, weight(x), 0)
    sure = jax.lax.psum(jnp.sum(greater, axis=-1, keepdims=True), part.axis)
    # A number of the last digit is one logit: its weight is known, no histogram of weights is needed.
    number = jnp.arange(1 << width, dtype=jnp.uint32)
    value = _float(_append(group, number, width), x.dtype)
    some = jnp.where((number >= digit.astype(jnp.uint32)) & (counts > 0), counts * weight(value), 0)
    return _float(prefix, x.dtype).astype(jnp.float32), sure + jnp.sum(some, axis=-1, keepdims=True)


def _nucleus(
    part: Slice,
    policy: Policy,
    x: Array,
    weight: Callable,
    weights: Array,
    cut: Float[Array, "B N 1"],
    mass: Float[Array, "B N 1"],
    take: Callable[..., Array],
) -> tuple[Float[Array, "B N 1"], Float[Array, "B N 1"]]:
    """What top-p makes of the cut and the weight from it on, as `truncate.truncate`."""
    bits = jnp.finfo(x.dtype).bits
    left, widths = bits - WEIGHTS[bits][0], WEIGHTS[bits][1:]
    top_p = truncate.each(policy.top_p)
    mass = jnp.minimum(mass, jnp.sum(weights, axis=-1, keepdims=True))
    need = jnp.maximum(top_p * mass, jnp.finfo(jnp.float32).tiny)
    digit, above = _digit(weights, need, jnp.zeros_like(need))
    prefix = digit.astype(jnp.uint32)

    def left_by_top_k(x: Array) -> Array:
        return jnp.where(x < cut, 0, weight(x))

    for width in widths:
        weights = jax.lax.psum(take(left, width, prefix, left_by_top_k), part.axis)
        digit, above = _digit(weights, need, above)
        prefix, left = _append(prefix, digit, width), left - width
    new = _float(prefix, x.dtype).astype(jnp.float32)
    at = jnp.sum(jnp.where(jnp.arange(weights.shape[-1]) == digit, weights, 0), axis=-1, keepdims=True)
    used = (top_p < 1) & (new > cut)
    return jnp.where(used, new, cut), jnp.where(used, above + at, mass)


def _ordered(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """A float's bits as an integer in the order of the floats, of as many bits; -0 is 0."""
    bits = jnp.finfo(x.dtype).bits
    word = jnp.uint16 if bits == 16 else jnp.uint32
    raw = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), word).astype(jnp.uint32)
    sign = jnp.uint32(1 << (bits - 1))
    return jnp.where(raw & sign, ~raw & jnp.uint32(2**bits - 1), raw | sign)


def _float(order: UInt32[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """The inverse of `_ordered`."""
    bits = jnp.finfo(dtype).bits
    sign = jnp.uint32(1 << (bits - 1))
    raw = jnp.where(order & sign, order ^ sign, ~order & jnp.uint32(2**bits - 1))
    return jax.lax.bitcast_convert_type(raw.astype(jnp.uint16 if bits == 16 else jnp.uint32), dtype)


def _append(prefix: UInt32[Array, "..."], digit: Array, width: int) -> UInt32[Array, "..."]:
    return (prefix << width) | digit.astype(jnp.uint32)


def _digit(histogram: Array, need: Array, above: Array) -> tuple[Int[Array, "B N 1"], Array]:
    """The greatest number such that what is ``above`` the histogram, and it from there on, is
    enough (0 if rounding finds none); and what lies above that number."""
    index = jnp.arange(histogram.shape[-1])
    reached = above + jax.lax.cumsum(histogram, axis=histogram.ndim - 1, reverse=True)
    digit = jnp.max(jnp.where(reached >= need, index, 0), axis=-1, keepdims=True)
    return digit, jnp.max(jnp.where(index > digit, reached, above), axis=-1, keepdims=True)


def _histogram(
    part: Slice,
    x: Float[Array, "B N W"],
    wanted: Bool[Array, ""],
    left: int,
    width: int,
    prefix: UInt32[Array, "B N 1"],
    weight: Callable[[Array], Array] | None,
) -> Float[Array, "B N F"]:
    """Of the next ``width`` bits: how many logits of the slice have each number there, or
    what they weigh, of those whose bits before the last ``left`` are ``prefix``."""
    piece = min(PIECE, x.shape[2])
    low, high = jnp.arange(1 << LOW), jnp.arange(1 << (width - LOW))

    def add(total: Array, index: Array) -> tuple[Array, None]:
        start = jnp.minimum(index * piece, x.shape[2] - piece)  # the last may overlap the one before
        some = jax.lax.dynamic_slice_in_dim(x, start, piece, axis=2)
        order = _ordered(some)
        new = start + jnp.arange(piece) >= index * piece
        inside = new if left == jnp.finfo(x.dtype).bits else new & ((order >> left) == prefix)
        digit = ((order >> (left - width)) & jnp.uint32(2**width - 1)).astype(jnp.int32)
        rows = (jnp.where(inside, digit >> LOW, -1)[..., None] == high).astype(jnp.float32)
        columns = (digit & ((1 << LOW) - 1))[..., None] == low
        parts = [jnp.ones(some.shape)] if weight is None else _thirds(weight(some))
        columns = jnp.concatenate([jnp.where(columns, one[..., None], 0) for one in parts], axis=-1)
        product = jnp.einsum("bnvh,bnvl->bnhl", rows, columns, precision=jax.lax.Precision.DEFAULT)
        return total + product, None

    parts = 1 if weight is None else 3
    empty = jnp.zeros((*x.shape[:2], high.size, parts * low.size))
    empty = jax.lax.pcast(empty, part.axis, to="varying")
    pieces = jnp.arange(math.ceil(x.shape[2] / piece))
    total = jax.lax.cond(wanted, lambda: jax.lax.scan(add, empty, pieces)[0], lambda: empty)
    total = total.reshape(*x.shape[:2], high.size, parts, low.size).sum(axis=3)
    return total.reshape(*x.shape[:2], 1 << width)


def _thirds(weight: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Three numbers of bfloat16's precision whose sum is the weight."""
    first = jax.lax.reduce_precision(weight, 8, 7)
    rest = weight - first
    second = jax.lax.reduce_precision(rest, 8, 7)
    return [first, second, rest - second]
