"""The first pass of fused verification on Hopper GPUs: a row of logits to the numbers of its law.

`jspec.pallas.law.summarise_ref` says what comes out. One kernel, grid (N, B): a program is one
row, which `GROUPS` warpgroups take in turn, a piece of ``span`` ids each. So there are
groups x span lanes, a few to a thread; each sees one id of every round and keeps, in registers,

* the sum of exp relative to the greatest logit so far, and that logit's first id;
* where its sequence uses top-k, top-p or min-p, the `KEPT` greatest logits.

So **each logit is read once**, whatever the vocabulary. The thresholds of
`jspec.sampling.truncate` are then found among the kept logits, from the highest bit down, 2
bits a step. Above the *horizon*, the greatest of the lanes' last kept logits, no logit is
missing there; a step that has to know of those below it, as in a nucleus of more than a
thousand ids, sweeps the row again, from the L2 cache (50 MB) while the logits fit.
`reads` tells how many sweeps each row took.

What limits it: some 30 operations a logit on the row's own multiprocessor, and reading.
top-k's cut is exact, top-p's up to the rounding of sums. Static: the shape, the dtype, ``span``
and ``groups``; traced: the logits and all settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jspec.pallas import compat
from jspec.pallas.law import Summary
from jspec.pallas.rows_gpu import LANES, check, slices, widen, window
from jspec.sampling.policy import Policy

GROUPS = 4
"""Warpgroups of a row."""

KEPT = 6
"""Logits that a lane keeps. Of 1000 ids six share one of 2048 lanes in one row of 26, of 50 hardly ever."""

BITS = 2
"""Of a threshold, found in one step."""

LOWEST = -(1 << 31)
"""The place of -inf in the order of the floats' bits; all below it are NaN."""


def summarise(policy: Policy, x: Float[Array, "B N V"], **options: Any) -> Summary:
    """`jspec.pallas.law.summarise_ref` as a kernel; the options are those of `reads`.

    Raises:
        JspecError: logits that are neither float32 nor bfloat16, or 2**24 ids or more.
    """
    return reads(policy, x, **options)[0]


def reads(
    policy: Policy, x: Float[Array, "B N V"], *, span: int = 512, groups: int = 0, interpret: Any = False
) -> tuple[Summary, Int[Array, "B N"]]:
    """The same, and how often each row was read. ``span``, a multiple of 128: ids of a piece."""
    groups = groups or (2 if interpret else GROUPS)  # simulated ones need a processor each
    check(x, "logits")
    vocab, x = x.shape[-1], widen(x)
    span, (batch, nodes, width) = slices(x, span), x.shape
    warm = policy.temperature > 0
    limits = Limits(
        scale=jnp.where(warm, jnp.clip(policy.temperature, 1e-30, 1e30), 1.0),
        top_k=jnp.where(warm, jnp.minimum(policy.top_k, vocab), 0),
        top_p=jnp.where(warm, policy.top_p, 1.0),
        low=jnp.where(warm, jnp.log(policy.min_p), -jnp.inf),
    )
    cuts = (limits.top_k > 0) | (limits.top_p < 1) | (limits.low > -jnp.inf)

    def body(x, scale, top_k, top_p, low, cuts, *refs):
        *outs, shared, met = refs
        node, row, group = (lax.axis_index(name) for name in ("node", "row", "group"))

        def join(operation: Callable[[Array, Array], Array], *values: Array) -> list[Array]:
            for i, value in enumerate(values):
                shared[i, group] = value
            _meet(met)
            joined = [
                functools.reduce(operation, [shared[i, g] for g in range(groups)]) for i in range(len(values))
            ]
            _meet(met)  # before the next numbers come
            return joined

        def piece(i: Array) -> tuple[Array, Array]:
            start, ids, own = window(width, span, group + i * groups)
            values = x[row, node, pl.ds(start, span)].astype(jnp.float32)
            values = jnp.where(values != values, jnp.inf, values)  # NaN is an error as +inf is
            return jnp.where(own, values, -jnp.inf), ids

        pieces = (pl.cdiv(width, span) - group + groups - 1) // groups
        own = Limits(scale[row], top_k[row], top_p[row], low[row])
        given = Row(piece, pieces, span, vocab, 8 * x.dtype.itemsize, join), own
        law = lax.cond(cuts[row] == 1, lambda: _truncated(*given), lambda: _whole(*given))

        @pl.when(group == 0)
        def _():
            for out, value in zip(outs, law, strict=True):
                out[row, node] = value

    dtypes = jnp.float32, jnp.float32, jnp.float32, jnp.int32, jnp.int32
    *summary, count = compat.gpu_kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((batch, nodes), dtype) for dtype in dtypes),
        grid=(nodes, batch),
        grid_names=("node", "row"),
        num_threads=groups,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM(((1 << BITS) - 1, groups), jnp.float32),
            plgpu.Barrier(num_arrivals=groups),
        ],
        interpret=interpret,
    )(x, *limits, cuts.astype(jnp.int32))
    return Summary(*summary), count


def _meet(met: Any) -> None:
    """Wait for the row's other warpgroups."""
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


class Limits(NamedTuple):
    """Settings, of each sequence or of one; without effect where temperature is 0."""

    scale: Float[Array, "*B"]
    top_k: Int[Array, "*B"]  # 0: off
    top_p: Float[Array, "*B"]
    low: Float[Array, "*B"]  # the least logit after the temperature, relative to the greatest


class Row(NamedTuple):
    """One row as one of its warpgroups sees it."""

    piece: Callable[[Array], tuple[Array, Array]]  # logits of its i-th piece, and their ids
    pieces: Int[Array, ""]
    span: int  # ids of a piece
    vocab: int
    bits: int  # of a logit
    join: Callable[..., list[Array]]  # numbers of all warpgroups


class Seen(NamedTuple):
    """What the first sweep tells."""

    top: Float[Array, ""]
    total: Float[Array, ""]  # of exp, relative to top
    best: Int[Array, ""]
    kept: tuple[Int[Array, "span"], ...]  # the places of each lane's greatest logits, in order


Law = tuple[Array, Array, Array, Array, Array]
"""top, cut, log_total, best of `Summary`, and the number of sweeps."""


def _whole(row: Row, own: Limits) -> Law:
    seen = _first(row, own, 1)
    return seen.top, jnp.float32(-jnp.inf), jnp.log(seen.total), seen.best, jnp.int32(1)


def _first(row: Row, own: Limits, count: int) -> Seen:
    """The first sweep; lanes keep ``count`` logits."""

    def step(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        kept, total, first = state
        values, ids = row.piece(i)
        greater = values > kept[0]
        ratio = jnp.exp(-jnp.abs(values - kept[0]) / own.scale)
        ratio = jnp.where(values > -jnp.inf, ratio, 0.0)
        total = jnp.where(greater, total * ratio + 1.0, total + ratio)
        first = jnp.where(greater, ids, first)
        sorted_in = []
        for one in kept:
            sorted_in.append(jnp.maximum(one, values))
            values = jnp.minimum(one, values)
        return tuple(sorted_in), total, first

    nothing = jnp.full((row.span,), -jnp.inf, jnp.float32)
    start = (nothing,) * count, jnp.zeros((row.span,), jnp.float32), jnp.zeros((row.span,), jnp.int32)
    kept, total, first = lax.fori_loop(0, row.pieces, step, start)
    (top,) = row.join(jnp.maximum, jnp.max(kept[0]))
    first = jnp.min(jnp.where(kept[0] == top, first, row.vocab))
    (best,) = row.join(jnp.minimum, first.astype(jnp.float32))
    good = (top > -jnp.inf) & (top < jnp.inf)
    top = jnp.where(good, top, jnp.nan)
    share = jnp.where(kept[0] > -jnp.inf, total * jnp.exp((kept[0] - top) / own.scale), 0.0)
    (total,) = row.join(jnp.add, jnp.sum(share))
    places = tuple(map(_place, kept))
    return Seen(top, total + 0 * top, jnp.where(good, best.astype(jnp.int32), 0), places)


def _truncated(row: Row, own: Limits) -> Law:
    """The same with top-k, then top-p, then min-p."""
    seen = _first(row, own, KEPT)
    (horizon,) = row.join(jnp.maximum, jnp.max(_float(seen.kept[-1])))
    edge = _one(_place, horizon)

    def weigh(x: Array, cut: Array, low: Array) -> Array:
        scaled = (x - seen.top) / own.scale
        return jnp.where((x >= cut) & (scaled >= low), jnp.exp(scaled), 0.0)

    def mass(weight: Callable[[Array], Array], missing: Array) -> tuple[Array, Array]:
        weights = [weight(_float(place)) for place in seen.kept]
        everything = jnp.int32(LOWEST), missing
        (found,), swept = _above(row, seen, weights, weight, [everything], jnp.float32(jnp.inf))
        return found, swept

    # A loop, so that there is one search to compile.
    def search(by_mass: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        cut, sweeps = state

        def weight(x: Array) -> Array:
            return jnp.where(jnp.full(x.shape, by_mass) == 1, weigh(x, cut, jnp.float32(-jnp.inf)), 1.0)

        def find() -> tuple[Array, Array]:
            found, swept = mass(weight, (by_mass == 1) & (cut > -jnp.inf) & (cut <= horizon))
            whole = jnp.where(cut > -jnp.inf, found, seen.total)
            least = jnp.maximum(own.top_p * whole, jnp.finfo(jnp.float32).tiny)
            need = jnp.where(by_mass == 1, least, own.top_k.astype(jnp.float32))
            place, again = _threshold(row, seen, edge, weight, need)
            new = _one(_float, place)  # NaN: rounding found none
            return jnp.where(new > cut, new, cut), sweeps + swept + again

        used = jnp.where(by_mass == 1, own.top_p < 1, own.top_k > 0)
        return lax.cond(used, find, lambda: (cut, sweeps))

    cut, sweeps = lax.fori_loop(0, 2, search, (jnp.float32(-jnp.inf), jnp.int32(1)))
    # min-p may take all that the lanes did not keep, where top-k and top-p do not
    missing = (cut <= horizon) & ((horizon - seen.top) / own.scale >= own.low)
    total, last = mass(functools.partial(weigh, cut=cut, low=own.low), missing)
    return seen.top, cut, jnp.log(total) + 0 * seen.top, seen.best, sweeps + last


def _threshold(
    row: Row, seen: Seen, edge: Array, weight: Callable[[Array], Array], need: Array
) -> tuple[Array, Array]:
    """The highest place at and above which lies what is needed; and the sweeps."""
    weights = [weight(_float(place)) for place in seen.kept]

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        place, sweeps = state
        shift = 32 - BITS - BITS * i
        limits = [place + lax.shift_left(jnp.int32(j), shift) for j in range(1, 1 << BITS)]
        found, swept = _above(row, seen, weights, weight, [(limit, limit <= edge) for limit in limits], need)
        passed = functools.reduce(jnp.add, [(amount >= need).astype(jnp.int32) for amount in found])
        return place + lax.shift_left(passed, shift), sweeps + swept

    place, sweeps = lax.fori_loop(0, row.bits // BITS, step, (jnp.int32(LOWEST), jnp.int32(0)))
    unused = jnp.int32((1 << 32 - row.bits) - 1)  # bits that bfloat16 lacks, all ones below 0
    return jnp.where(place < 0, place | unused, place), sweeps


def _above(
    row: Row,
    seen: Seen,
    weights: Sequence[Array],
    weight: Callable[[Array], Array],
    limits: Sequence[tuple[Array, Array]],
    need: Array,
) -> tuple[Sequence[Array], Array]:
    """What lies at and above each limit, as far as it matters whether that is what is needed.

    ``weights`` of the kept logits are enough, unless some are missing, as a limit's second
    part says, and there is too little without them: then the row is swept again. Also whether
    it was, 0 or 1.
    """

    def total(limit: Array) -> Array:
        return jnp.sum(
            sum(jnp.where(place >= limit, w, 0.0) for place, w in zip(seen.kept, weights, strict=True))
        )

    def add(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        x, _ = row.piece(i)
        w, places = weight(x), _place(x)
        return tuple(
            t + jnp.where(places >= limit, w, 0.0) for t, (limit, _) in zip(totals, limits, strict=True)
        )

    def sweep() -> list[Array]:
        start = (jnp.zeros((row.span,), jnp.float32),) * len(limits)
        return row.join(jnp.add, *map(jnp.sum, lax.fori_loop(0, row.pieces, add, start)))

    known = row.join(jnp.add, *(total(limit) for limit, _ in limits))
    unsure = functools.reduce(
        jnp.logical_or, [lacks & (amount < need) for (_, lacks), amount in zip(limits, known, strict=True)]
    )
    return lax.cond(unsure, sweep, lambda: known), unsure.astype(jnp.int32)


def _place(x: Float[Array, "span"]) -> Int[Array, "span"]:
    """A float32's place among them in their order, as an int32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(~LOWEST), bits)


def _float(place: Int[Array, "span"]) -> Float[Array, "span"]:
    """The float32 at a place."""
    return lax.bitcast_convert_type(jnp.where(place < 0, place ^ jnp.int32(~LOWEST), place), jnp.float32)


def _one(convert: Callable[[Array], Array], value: Array) -> Array:
    """`_place` or `_float` of a single number, which Mosaic GPU cannot take for another type."""
    return jnp.max(convert(jnp.full((LANES,), value)))
