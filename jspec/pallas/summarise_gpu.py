"""The first pass of fused verification on Hopper GPUs: a row of logits to the numbers of its law.

`jspec.pallas.law.summarise_ref` says what comes out. Two kernels, one program of either being
one warpgroup with ``span`` ids of one row in its registers, so that also the 6 rows of batch
1 fill the chip; logits are read from global memory as they lie, without a copy, and there is
no shared memory but for the warpgroup's own reductions.

* `_peaks`, grid (slices, N, B): the slice's greatest logit, its first id, and the sum relative
  to it. XLA joins the slices, B N V / span numbers. **Each logit is read once**; that is all
  for rows with temperature 0, or without top-k, top-p and min-p.
* `_weigh`, grid (slices, N, B): what of a slice lies at or above each of 16 (or 1) thresholds,
  as a count or as probability. The search of `jspec.sampling.truncate`, from the highest bit
  down, 4 bits a sweep: **8 sweeps in float32, 4 in bfloat16, once for top-k and once for
  top-p**, each where a row of the batch uses it, then one sweep for the total. Rows that need
  none of them are not read; nor are slices that hold nothing between the two thresholds that
  are left. On logits like a model's (128256 ids) a row is read 4 to 6 times in all with top-k
  or top-p, 8 times with both, 1.1 times with min-p; from the L2 cache (50 MB) while it fits.

Keeping a row in shared memory would save these readings, but leave one warpgroup to each
multiprocessor and 6 of those to batch 1: the search is bound by its comparisons, so that
costs more time than it saves. top-k's cut is exact, top-p's up to the rounding of sums.
Static: the shape, the dtype and ``span``; traced: the logits and all settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Shaped

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.law import Summary
from jspec.sampling.policy import Policy
from jspec.sampling.truncate import any_of, each

LANES = 128
"""Threads of a warpgroup, the least that a program can take of a row."""

BITS = 4
"""Of a threshold, found in one sweep."""

COUNTED = 1 << 24  # float32 counts no further


def summarise(
    policy: Policy, x: Float[Array, "B N V"], *, span: int = 4096, interpret: Any = False
) -> Summary:
    """`jspec.pallas.law.summarise_ref` as kernels; ``span`` ids a program, a multiple of 128.

    Raises:
        JspecError: logits that are neither float32 nor bfloat16, or 2**24 ids or more.
    """
    check(x, "logits")
    vocab, x = x.shape[-1], widen(x)
    span = slices(x, span)
    warm = policy.temperature > 0
    scale = jnp.where(warm, jnp.clip(policy.temperature, 1e-30, 1e30), 1.0)
    peak, total, first = _peaks(x, 1 / scale, span, interpret)
    top = jnp.max(peak, axis=-1)
    top = jnp.where(jnp.isfinite(top), top, jnp.nan)
    best = jnp.take_along_axis(first, jnp.argmax(peak == top[..., None], axis=-1)[..., None], axis=-1)
    share = jnp.where(peak > -jnp.inf, total * jnp.exp((peak - top[..., None]) / each(scale)), 0.0)
    plain = jnp.full_like(top, -jnp.inf), jnp.log(jnp.sum(share, axis=-1)) + 0 * top
    cuts = warm & ((policy.top_k > 0) | (policy.top_p < 1) | (policy.min_p > 0))

    def weigh(sweep: Sweep, count: int) -> Array:
        sweep = sweep._replace(alive=sweep.alive.astype(jnp.int32))
        return _weigh(x, top, scale, sweep, count=count, span=span, interpret=interpret)

    def search() -> tuple[Array, Array]:
        cut, log_total = _search(policy, weigh, x, vocab, peak, top, scale, cuts)
        return jnp.where(cuts[:, None], cut, plain[0]), jnp.where(cuts[:, None], log_total, plain[1])

    cut, log_total = lax.cond(any_of(cuts), search, lambda: plain)
    return Summary(top, cut, log_total, jnp.where(jnp.isnan(top), 0, best[..., 0]))


def check(x: Array, name: str) -> None:
    """Raise JspecError for rows that the kernels cannot take."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise JspecError(f"the GPU kernels take {name} in float32 or bfloat16, not {x.dtype}")
    if x.shape[-1] >= COUNTED:
        raise JspecError(f"the GPU kernels take less than {COUNTED} ids, not {x.shape[-1]}")


def widen(x: Float[Array, "B N V"]) -> Float[Array, "B N W"]:
    """Rows of 128 ids at least: only a vocabulary of fewer is copied."""
    missing = max(LANES - x.shape[-1], 0)
    return jnp.pad(x, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf) if missing else x


def slices(x: Array, span: int) -> int:
    """How many ids a program takes: ``span``, or less in a small vocabulary.

    A thread loads up to 8 bytes at once, which must be aligned. Where rows do not begin at
    multiples of 8 bytes the number is an odd multiple of 128, for which it loads single ids.
    """
    if span < LANES or span % LANES:
        raise JspecError(f"span is {span}; it must be a multiple of {LANES}")
    vocab = x.shape[-1]
    parts = min(span, vocab) // LANES
    if vocab * x.dtype.itemsize % 8:
        parts -= 1 - parts % 2
    return parts * LANES


def window(vocab: int, span: int) -> tuple[Array, Array, Array]:
    """Where this program's slice lies: the first id it reads, all of them, and which are its own.

    The last slice begins early rather than ends outside; what it shares is its neighbour's.
    """
    begin = lax.axis_index("slice") * span
    start = jnp.minimum(begin, vocab - span)
    ids = lax.broadcasted_iota(jnp.int32, (span,), 0) + start
    return start, ids, ids >= begin


def _peaks(x: Array, inverse: Float[Array, "B"], span: int, interpret: Any) -> tuple[Array, Array, Array]:
    """Each slice's greatest logit, sum relative to it and first greatest id: [B, N, slices] each."""
    batch, nodes, vocab = x.shape

    def body(x, inverse, peak, total, first):
        node, row, part = (lax.axis_index(name) for name in ("node", "row", "slice"))
        start, ids, own = window(vocab, span)
        values = x[row, node, pl.ds(start, span)].astype(jnp.float32)
        values = jnp.where(values != values, jnp.inf, values)  # NaN is an error as +inf is
        values = jnp.where(own, values, -jnp.inf)
        top = jnp.max(values)
        at = jnp.where(top > -jnp.inf, top, 0.0)
        peak[row, node, part] = top
        total[row, node, part] = jnp.sum(jnp.exp((values - at) * inverse[row]))
        first[row, node, part] = jnp.min(jnp.where((values == top) & own, ids, vocab))

    shape = batch, nodes, -(-vocab // span)
    return compat.gpu_kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)),
        grid=shape[::-1],
        grid_names=("slice", "node", "row"),
        interpret=interpret,
    )(x, inverse)


class Sweep(NamedTuple):
    """What `_weigh` asks of each row."""

    counts: Int[Array, "B"]  # 1: the number of ids; 0: their weight relative to top
    cut: Float[Array, "B N"]  # no lower logit has weight
    low: Float[Array, "B"]  # nor one that is lower after the temperature, relative to top
    place: Int[Array, "B N"]  # of the first threshold among the floats in their order
    shift: Int[Array, "1"]  # from each threshold to the next: 1 << shift places
    alive: Shaped[Array, "B N slices"]  # whether the slice is read at all


def _weigh(
    x: Array, top: Array, scale: Array, sweep: Sweep, *, count: int, span: int, interpret: Any
) -> Float[Array, "B N slices {count}"]:
    """What of each slice lies at or above each threshold; anything in slices that are not wanted."""
    batch, nodes, vocab = x.shape

    def body(x, top, scale, counts, cut, low, place, shift, alive, out):
        node, row, part = (lax.axis_index(name) for name in ("node", "row", "slice"))

        @pl.when(alive[row, node, part] == 1)
        def _():
            start, _, own = window(vocab, span)
            values = x[row, node, pl.ds(start, span)].astype(jnp.float32)

            def probability() -> Array:
                scaled = (values - top[row, node]) / scale[row]
                return jnp.where((values >= cut[row, node]) & (scaled >= low[row]), jnp.exp(scaled), 0.0)

            weight = lax.cond(counts[row] == 1, lambda: jnp.ones((span,), jnp.float32), probability)
            weight = jnp.where(own, weight, 0.0)
            places, first, by = _place(values), place[row, node], shift[0]

            def step(i: Array, _: None) -> None:
                above = places >= first + lax.shift_left(i, by)
                out[row, node, part, i] = jnp.sum(jnp.where(above, weight, 0.0))

            lax.fori_loop(0, count, step, None)

    shape = batch, nodes, -(-vocab // span)
    return compat.gpu_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*shape, count), jnp.float32),
        grid=shape[::-1],
        grid_names=("slice", "node", "row"),
        interpret=interpret,
    )(x, top, scale, *sweep)


LOWEST = -(1 << 31)


def _place(x: Float[Array, "*any"]) -> Int[Array, "*any"]:
    """A float32's place among them in their order, as an int32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ ~LOWEST, bits)


def _float(place: Int[Array, "*any"]) -> Float[Array, "*any"]:
    """The float32 at a place."""
    return lax.bitcast_convert_type(jnp.where(place < 0, place ^ ~LOWEST, place), jnp.float32)


Weigh = Callable[[Sweep, int], Array]


def _search(
    policy: Policy, weigh: Weigh, x: Array, vocab: int, peak: Array, top: Array, scale: Array, cuts: Array
) -> tuple[Array, Array]:
    """Cut and log-total of the rows where ``cuts``; of the others anything."""
    by_k, by_p = cuts & (policy.top_k > 0), cuts & (policy.top_p < 1)
    weights = Sweep(
        counts=jnp.zeros_like(policy.top_k),
        cut=jnp.full(x.shape[:2], -jnp.inf),
        low=jnp.full(cuts.shape, -jnp.inf),
        place=jnp.full(x.shape[:2], LOWEST),
        shift=jnp.zeros(1, jnp.int32),
        alive=jnp.zeros(peak.shape, bool),
    )

    def kth_greatest(cut: Array) -> Array:
        sweep = weights._replace(
            counts=jnp.ones_like(policy.top_k), alive=jnp.broadcast_to(each(by_k), peak.shape)
        )
        k = jnp.minimum(policy.top_k, vocab).astype(jnp.float32)[:, None]
        found = _threshold(x.dtype, weigh, lambda whole: k + 0 * whole, sweep)
        return jnp.where(by_k[:, None], found, cut)

    def nucleus(cut: Array) -> Array:
        sweep = weights._replace(cut=cut, alive=each(by_p) & (peak >= cut[..., None]))
        p, least = policy.top_p[:, None], jnp.finfo(jnp.float32).tiny
        found = _threshold(x.dtype, weigh, lambda whole: jnp.maximum(p * whole, least), sweep)
        return jnp.where(by_p[:, None] & (found > cut), found, cut)

    cut = lax.cond(any_of(by_k), kth_greatest, lambda cut: cut, weights.cut)
    cut = lax.cond(any_of(by_p), nucleus, lambda cut: cut, cut)
    low = jnp.log(policy.min_p)
    highest = (peak - top[..., None]) / each(scale)
    alive = each(cuts) & (peak >= cut[..., None]) & (highest >= each(low) - 0.01)  # and not for an ulp less
    parts = weigh(weights._replace(cut=cut, low=low, alive=alive), 1)[..., 0]
    return cut, jnp.log(jnp.sum(jnp.where(alive, parts, 0.0), axis=-1))


def _threshold(
    dtype: Any, weigh: Weigh, needed: Callable[[Array], Array], sweep: Sweep
) -> Float[Array, "B N"]:
    """The greatest float t of the dtype such that at and above it there is what is needed of the
    whole; if there is none, NaN. Of a slice in which the last step's bracket holds nothing, all
    is known, so it is not read again."""
    width = 8 * jnp.dtype(dtype).itemsize

    def step(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        place, need, alive, above = state
        shift = 32 - BITS - BITS * i
        parts = weigh(sweep._replace(place=place, shift=shift[None], alive=alive), 1 << BITS)
        parts = jnp.where(alive[..., None], parts, above[..., None])
        found = jnp.sum(parts, axis=2)
        need = jnp.where(i == 0, needed(found[..., 0]), need)  # all lies above the first place
        passed = jnp.sum(found[..., 1:] >= need[..., None], axis=-1)
        edges = jnp.concatenate([parts, above[..., None]], axis=-1)
        inside, above = (
            jnp.take_along_axis(edges, (passed + j)[:, :, None, None], axis=-1)[..., 0] for j in (0, 1)
        )
        return place + (passed << shift), need, alive & (inside != above), above

    shape = sweep.place.shape
    start = sweep.place, jnp.zeros(shape), sweep.alive, jnp.zeros(sweep.alive.shape)
    place = lax.fori_loop(0, width // BITS, step, start)[0]
    unused = (1 << 32 - width) - 1  # bits that bfloat16 lacks, all ones below 0
    return _float(jnp.where(place < 0, place | unused, place))
