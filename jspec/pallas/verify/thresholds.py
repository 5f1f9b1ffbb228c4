"""The distribution of rows of logits, inside a kernel that sees them piece by piece and once.

A piece has one logit for each *lane* of a row. A lane keeps, in registers, the sum of exp
relative to its greatest logit so far, that logit's first id and, where a row uses top-k,
top-p or min-p, its k greatest logits (``kept_per_lane``). The thresholds of `jspec.sampling.truncate` are
found among those, from the highest bit down. Above the *horizon*, the greatest of the lanes'
last kept logits, no logit is missing there. A step that has to know of those below it sweeps
the rows again. So every row gets its cut, top-k's exactly, top-p's up to the rounding of sums;
and of rows where n ids lie above a threshold, which fall on L lanes evenly, about
C(n, k) / L ** (k - 1) are seen more than once, if that is little.

A *number* is what a kernel has of each of its rows: a scalar where it takes one, a column
where it takes several. Float logits are compared as integers in the same order, *places*.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.pallas.verify.reference import RowStats
from jspec.types import Policy

LOWEST = -(1 << 31)


class Limits(NamedTuple):
    """Settings as numbers, without effect where temperature is 0."""

    scale: Float[Array, "*B"]
    top_k: Int[Array, "*B"]  # 0: off
    top_p: Float[Array, "*B"]
    low: Float[Array, "*B"]  # the least logit after the temperature, relative to the greatest

    @property
    def cut(self) -> Bool[Array, "*B"]:
        """Whether a row needs more than its greatest logit and its total."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.low > -jnp.inf)


class Rows(NamedTuple):
    """What a chip's kernel gives: its rows, and how their lanes become numbers."""

    vocab: int
    bits: int  # of a logit
    shape: tuple[int, ...]  # of a piece, a vector
    fold: Callable[[Callable[..., Any], Any], Any]  # visit(logits, ids, state) over all pieces, from a state
    together: Callable[[Sequence[Array]], Array]  # vectors as one, in any order
    total: Callable[[Array], Array]  # of a vector the sum, a number
    highest: Callable[[Array], Array]
    lowest: Callable[[Array], Array]
    any: Callable[[Array], Array]  # whether a flag is set in any row
    single: Callable[[Callable[[Array], Array], Array], Array]  # apply `place` or `unplace` to a number


class Seen(NamedTuple):
    """What the first sweep has told of the rows, as numbers, and what the lanes kept."""

    top: Float[Array, "*n"]
    total: Float[Array, "*n"]  # of exp, relative to top
    best: Int[Array, "*n"]
    kept: Sequence[Float[Array, "*v"]]  # in order


def limits(policy: Policy, vocab: int) -> Limits:
    """The settings of each sequence."""
    sampled = policy.temperature > 0
    return Limits(
        scale=jnp.where(sampled, jnp.minimum(policy.temperature, 1e30), 1.0),
        top_k=jnp.where(sampled, jnp.minimum(policy.top_k, vocab), 0),
        top_p=jnp.where(sampled, policy.top_p, 1.0),
        low=jnp.where(sampled, jnp.log(policy.min_p), -jnp.inf),
    )


def clean(x: Array) -> Float[Array, "*v"]:
    """Logits as the search takes them: a NaN is an error as +inf is."""
    x = x.astype(jnp.float32)
    return jnp.where(x != x, jnp.inf, x)


def row_stats(rows: Rows, own: Limits, cuts: Array, kept_per_lane: int) -> tuple[RowStats, Array]:
    """The distribution of each row, as a kernel's numbers, and how many sweeps it took.

    ``cuts``: `Limits.cut`.
    """

    def whole() -> tuple[RowStats, Array]:
        seen = _first(rows, own, 1)
        no_cut = _same(seen.top, jnp.float32(-jnp.inf))
        return RowStats(seen.top, no_cut, jnp.log(seen.total), seen.best), jnp.int32(1)

    def truncated() -> tuple[RowStats, Array]:
        seen = _first(rows, own, kept_per_lane)
        cut, total, sweeps = _cut(rows, own, seen)
        return RowStats(seen.top, cut, jnp.log(total) + 0 * seen.top, seen.best), 1 + sweeps

    return lax.cond(rows.any(cuts), truncated, whole)


def _first(rows: Rows, own: Limits, kept_per_lane: int) -> Seen:
    """The first sweep."""

    def step(values: Array, ids: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        kept, total, first = state
        greater = values > kept[0]
        ratio = jnp.where(values > -jnp.inf, jnp.exp(-jnp.abs(values - kept[0]) / own.scale), 0.0)
        total = jnp.where(greater, total * ratio + 1.0, total + ratio)
        first = jnp.where(greater, ids, first)
        in_order = []
        for one in kept:
            in_order.append(jnp.maximum(one, values))
            values = jnp.minimum(one, values)
        return tuple(in_order), total, first

    nothing = jnp.full(rows.shape, -jnp.inf, jnp.float32)
    start = (nothing,) * kept_per_lane, jnp.zeros(rows.shape, jnp.float32), jnp.zeros(rows.shape, jnp.int32)
    kept, total, first = rows.fold(step, start)
    top = rows.highest(kept[0])
    best = rows.lowest(jnp.where(kept[0] == top, first, rows.vocab))
    good = (top > -jnp.inf) & (top < jnp.inf)
    top = jnp.where(good, top, jnp.nan)
    share = jnp.where(kept[0] > -jnp.inf, total * jnp.exp((kept[0] - top) / own.scale), 0.0)
    return Seen(top, rows.total(share) + 0 * top, jnp.where(good, best, 0), kept)


class Weighed(NamedTuple):
    """What a logit weighs, and what those weigh that were kept."""

    weight: Callable[[Array], Array]
    places: Int[Array, "*v"]
    kept: Float[Array, "*v"]


def _cut(rows: Rows, own: Limits, seen: Seen) -> tuple[Array, Array, Array]:
    """The least logit that top-k and top-p keep, what is left after min-p, and further sweeps."""
    horizon, none = rows.highest(seen.kept[-1]), jnp.float32(-jnp.inf)
    edge, places = rows.single(place, horizon), place(rows.together(seen.kept))

    def weighed(weight: Callable[[Array], Array]) -> Weighed:
        # From the places, so that logits and places do not fill the registers together.
        return Weighed(weight, places, weight(unplace(places)))

    def weigh(x: Array, cut: Array, low: Array) -> Array:
        scaled = (x - seen.top) / own.scale
        return jnp.where((x >= cut) & (scaled >= low), jnp.exp(scaled), 0.0)

    def mass(cut: Array, low: Array, wanted: Array) -> tuple[Array, Array]:
        """What is kept; sums of the first sweep if that is all, else of what lanes kept or of a sweep."""
        everything = (cut == -jnp.inf) & (low == -jnp.inf)
        missing = wanted & ~everything & (cut <= horizon) & ((horizon - seen.top) / own.scale >= low)
        by = weighed(functools.partial(weigh, cut=cut, low=low))
        limit, most = _same(seen.top, jnp.int32(LOWEST)), _same(seen.top, jnp.float32(jnp.inf))
        found, swept = _above(rows, by, limit, missing, most)
        return jnp.where(everything, seen.total, found), swept

    # A loop, so that there is one search to compile: first by number, then by mass.
    def search(by_mass: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        cut, sweeps = state
        used = jnp.where(by_mass == 1, own.top_p < 1, own.top_k > 0)

        def weight(x: Array) -> Array:
            return jnp.where(jnp.full(x.shape, by_mass) == 1, weigh(x, cut, none), 1.0)

        def find() -> tuple[Array, Array]:
            left, swept = mass(cut, _same(cut, none), used)
            part = jnp.maximum(own.top_p * left, jnp.finfo(jnp.float32).tiny)
            need = jnp.where(by_mass == 1, part, own.top_k.astype(jnp.float32))
            found, again = _threshold(rows, weighed(weight), edge, used, need)
            new = rows.single(unplace, found)  # NaN: rounding found none
            return jnp.where(used & (new > cut), new, cut), sweeps + swept + again

        return lax.cond(rows.any(used), find, lambda: state)

    cut, sweeps = lax.fori_loop(0, 2, search, (_same(seen.top, none), jnp.int32(0)))
    total, last = mass(cut, own.low, _same(cut, jnp.bool_(True)))
    return cut, total, sweeps + last


def _threshold(rows: Rows, by: Weighed, edge: Array, used: Array, need: Array) -> tuple[Array, Array]:
    """The highest place at and above which lies what is needed; and the sweeps."""

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        found, sweeps = state
        higher = found + (jnp.int32(1) << (31 - i))
        amount, swept = _above(rows, by, higher, used & (higher <= edge), need)
        return jnp.where(amount >= need, higher, found), sweeps + swept

    start = _same(edge, jnp.int32(LOWEST)), jnp.int32(0)
    found, sweeps = lax.fori_loop(0, rows.bits, step, start)
    unused = (1 << 32 - rows.bits) - 1  # bits that bfloat16 lacks, all ones below 0
    return jnp.where(found < 0, found | unused, found), sweeps


def _above(rows: Rows, by: Weighed, at: Array, missing: Array, need: Array) -> tuple[Array, Array]:
    """What lies at and above a place, as far as it matters whether that is what is needed.

    The kept logits are enough, unless others are ``missing`` and there is too little without
    them: then all rows are swept. Also whether they were, 0 or 1.
    """

    def over(places: Array, weight: Array) -> Array:
        return jnp.where(places >= at, weight, 0.0)

    def visit(x: Array, ids: Array, sum: Array) -> Array:
        return sum + over(place(x), by.weight(x))

    def sweep() -> Array:
        return rows.total(rows.fold(visit, jnp.zeros(rows.shape, jnp.float32)))

    known = rows.total(over(by.places, by.kept))
    again = rows.any(missing & (known < need))
    return lax.cond(again, sweep, lambda: known), again.astype(jnp.int32)


def _same(number: Array, value: Array) -> Array:
    """The same value as a number of each row."""
    return jnp.broadcast_to(value, number.shape)


def place(x: Float[Array, "*v"]) -> Int[Array, "*v"]:
    """A float32's place among them in their order, as an int32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(~LOWEST), bits)


def unplace(place: Int[Array, "*v"]) -> Float[Array, "*v"]:
    """The float32 at a place."""
    return lax.bitcast_convert_type(jnp.where(place < 0, place ^ jnp.int32(~LOWEST), place), jnp.float32)
