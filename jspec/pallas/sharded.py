"""Fused verification of logits whose vocabulary is sharded over a mesh axis, never gathered.

Each shard reduces its own slice; histograms and single numbers cross the network, in at
most 6 steps that wait for each other:

1. the greatest logit (with every drafted token's own), and a histogram of the logits'
   highest bits;
2. to 5. the rest of the two thresholds, digit by digit of the order-preserving integer of
   the float: a histogram counts (top-k) or weighs (top-p) the logits that share the digits
   found so far, so 11 bits are found a step, not one;
6. the race: each shard's best score, id and log p.

| step | top-k, float32 | top-p, float32 | bfloat16 has 16 bits |
|---|---|---|---|
| 1 | counts, 11 bits | | counts, 8 bits |
| 2 | counts, 10 bits | weights, 10 bits | counts and weights, 8 bits: top-k is found |
| 3 | counts, 11 bits: found | | weights, 8 bits: top-p is found |
| 4, 5 | | weights, 11 + 11 bits: found | |

Counts are int32, weights float32: a result has at most 2048 numbers of 4 bytes a row of
logits, 64 kB a sequence of N <= 8 rows (in proportion for larger trees). Where no sequence
uses top-k or top-p there is no histogram: steps 1, 2 and 6 with single numbers.

A histogram is a product of two one-hot matrices, of a digit's high and low bits, in pieces
of the vocabulary (``PIECE``): a matrix unit's work on TPU and GPU, where scattered
additions are slow or, in floats, come in any order. Its operands are exact in bfloat16
(a weight as the sum of three parts), so one pass of the fastest kind of product is exact
up to the float32 sums, and equal on every run.

Static: mesh, axis, shapes, rule. Traced: all data. All other mesh axes are left to XLA.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.errors import JspecError
from jspec.pallas import law as laws
from jspec.pallas import verify as fused
from jspec.pallas.law import End, Summary
from jspec.sampling import keys, truncate, verify, walk
from jspec.sampling import policy as target_law
from jspec.sampling.policy import History, Policy
from jspec.sampling.truncate import any_of
from jspec.sampling.verify import Verifier
from jspec.types import Proposal, Verdict

log = logging.getLogger(__name__)

PIECE = 512
"""Ids that a histogram takes at a time."""

LOW = 5
"""Bits of a digit in the narrow one of the two one-hot matrices."""

COUNTS = {16: (8, 8), 32: (11, 10, 11)}
WEIGHTS = {16: (8, 8), 32: (10, 11, 11)}
"""Bits found a step, of floats of 16 and of 32 bits. Counts and first weights share step 2."""

MAX_VOCAB = 2**24
"""Ids cross the network as float32."""


class Slice(NamedTuple):
    """A shard's part of the vocabulary."""

    axis: str
    shards: int
    first: Int[Array, ""]  # its first id
    width: int  # the number of its ids

    @property
    def vocab(self) -> int:
        return self.width * self.shards


def make(mesh: Mesh, axis: str) -> Callable[..., Verdict]:
    """Build a ``decide`` with the signature of `jspec.sampling.walk.decide` for logits
    [B, N, V] (and draft laws) whose V is sharded over a mesh axis. Everything else that it
    takes is replicated over that axis, and so is the verdict.

    Rules without a fused form (`jspec.pallas.verify`) go by the plain walk, under whatever
    exchange XLA chooses for it, and the reason is logged.

    Raises:
        JspecError: no such axis, or one that is not of type Auto; in ``decide``: V is no
            multiple of the shards (pad the head; ids of -inf are legal), or is too large.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    >>> make(mesh, "data")
    Traceback (most recent call last):
    jspec.errors.JspecError: the mesh has no axis 'data'; its axes are model
    """
    if axis not in mesh.axis_names:
        raise JspecError(f"the mesh has no axis {axis!r}; its axes are {', '.join(mesh.axis_names)}")
    kind = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis]
    if kind != jax.sharding.AxisType.Auto:
        raise JspecError(f"the mesh axis {axis!r} is of type {kind.name}; it must be of type Auto")
    shards = mesh.shape[axis]

    def decide(
        verifier: Verifier,
        policy: Policy,
        history: History,
        key: UInt32[Array, "B 2"],
        position: Int[Array, "B"],
        proposal: Proposal,
        logits: Float[Array, "B N V"],
        depth: int,
    ) -> Verdict:
        verify.check_legal(verifier, "chain" if proposal.tree.mask is None else "tree")
        _check_vocab(logits.shape[-1], axis, shards)
        if fused.rule_of(verifier, proposal) is None:
            log.info("the rule %r is judged by plain code on sharded logits", verifier.name)
            return walk.decide(verifier, policy, history, key, position, proposal, logits, depth)

        def judge(adjusted: bool) -> Verdict:
            wide = PartitionSpec(None, None, axis)
            everywhere = PartitionSpec()
            by_id = Policy(*(everywhere for _ in policy[:-1]), bias=PartitionSpec(None, axis))
            own = Proposal(everywhere, everywhere, everywhere, wide)
            specs = by_id, everywhere, everywhere, everywhere, own, wide
            local = jax.shard_map(
                lambda *given: _judge(axis, shards, adjusted, verifier, depth, *given),
                mesh=mesh,
                in_specs=specs,
                out_specs=everywhere,
                axis_names={axis},
            )
            return local(policy, history, key, position, proposal, logits)

        changed = target_law.is_adjusted(policy, history, proposal.tree)
        return jax.lax.cond(changed, lambda: judge(True), lambda: judge(False))

    return decide


def _check_vocab(vocab: int, axis: str, shards: int) -> None:
    if vocab % shards:
        raise JspecError(
            f"a vocabulary of {vocab} ids does not divide by the {shards} shards of the mesh axis {axis!r}: "
            f"pad the head to {-(-vocab // shards) * shards} ids, with logits of -inf"
        )
    if vocab > MAX_VOCAB:
        raise JspecError(f"a vocabulary of {vocab} ids is too large: at most {MAX_VOCAB} can be sharded")


def _judge(
    axis: str,
    shards: int,
    adjusted: bool,
    verifier: Verifier,
    depth: int,
    policy: Policy,
    history: History,
    key: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    proposal: Proposal,
    x: Float[Array, "B N W"],
) -> Verdict:
    """On one shard: everything but ``x``, ``logq`` and the bias is the same on all."""
    width = x.shape[-1]
    part = Slice(axis, shards, jax.lax.axis_index(axis) * width, width)
    if adjusted:
        here = history._replace(tokens=_local(part, history.tokens), stop=_local(part, history.stop))
        tokens = _local(part, proposal.tokens)
        x = target_law.adjust(policy, here, tokens, proposal.tree, x.astype(jnp.float32))
    reads = fused.Reads(
        survey=lambda *given: survey(part, *given),
        race=lambda *given: race(part, *given),
        entry=lambda x, node, token: _entry(part, x, node, token),
        greatest=lambda x: _greatest(part, x),
        each=lambda draw, nodes: jax.vmap(draw)(nodes),  # one exchange for all, not one each
        block=lambda round, reads, depth: _block(part, round, reads, depth),
    )
    return fused.judge_by(reads, verifier, policy, key, position, proposal, x, depth)


def _local(part: Slice, ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Ids within the slice; its width, which is beyond it, for those of other shards."""
    own = ids - part.first
    return jnp.where((own >= 0) & (own < part.width), own, part.width)


def _entry(
    part: Slice, x: Float[Array, "B N W"], node: Int[Array, "B M"], token: Int[Array, "B M"]
) -> Float[Array, "B M"]:
    """Single logits, from the shards that have them."""
    own = _local(part, token)
    value = x[jnp.arange(x.shape[0])[:, None], node, jnp.minimum(own, part.width - 1)].astype(jnp.float32)
    return jax.lax.pmax(jnp.where(own < part.width, value, -jnp.inf), part.axis)


def _greatest(part: Slice, x: Float[Array, "B N W"]) -> Float[Array, "B N"]:
    """Of whole rows; +inf where there is a NaN, which a maximum may overlook."""
    x = x.astype(jnp.float32)
    return jax.lax.pmax(jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=-1), part.axis)


def survey(
    part: Slice, policy: Policy, x: Float[Array, "B N W"], entries: Callable[[], Any] = lambda: None
) -> tuple[Summary, Any]:
    """The law of each row (`jspec.pallas.law.summarise_ref`) from a slice of it, under
    `jax.shard_map`; and ``entries()``, whose own exchange is part of the first step.

    The cut by top-k is exact, that by top-p is up to the rounding of the weights' sums.
    """
    if x.dtype != jnp.bfloat16:
        x = x.astype(jnp.float32)
    sampled = policy.temperature > 0
    by_count = any_of(sampled & (policy.top_k > 0))
    by_weight = any_of(sampled & (policy.top_p < 1))

    # Whole branches, entries too: XLA's CPU code confuses collectives that run beside a
    # conditional with those in it. Within a branch no collective is in a conditional.
    def truncated() -> tuple[Summary, Any]:
        return _truncated(part, policy, x, by_count, by_weight), entries()

    def whole() -> tuple[Summary, Any]:
        top = _top(part, x)
        total = jax.lax.psum(_total(policy, x, top), part.axis)
        return _summary(top, jnp.full_like(top, -jnp.inf), total, _best(part, x, top)), entries()

    return jax.lax.cond(by_count | by_weight, truncated, whole)


def _summary(top: Array, cut: Array, total: Array, best: Array) -> Summary:
    return Summary(top[..., 0], cut[..., 0], jnp.log(total)[..., 0], best)


def _top(part: Slice, x: Array) -> Float[Array, "B N 1"]:
    top = _greatest(part, x)
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


def _truncated(part: Slice, policy: Policy, x: Array, by_count: Array, by_weight: Array) -> Summary:
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

    cut, mass = _kth_greatest(part, policy, x, weight, counts, functools.partial(take, by_count))
    cut, mass = jnp.where(by_count, cut, -jnp.inf), jnp.where(by_count, mass, jnp.inf)
    new, new_mass = _nucleus(part, policy, x, weight, weights, cut, mass, functools.partial(take, by_weight))
    cut, mass = jnp.where(by_weight, new, cut), jnp.where(by_weight, new_mass, mass)
    # What min-p keeps and what top-k and top-p keep are each all from some logit on, so one
    # lies within the other, and what both keep weighs the lesser of the two.
    return _summary(top, cut, jnp.minimum(total, mass), best)


def _kth_greatest(
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


def race(
    part: Slice,
    policy: Policy,
    x: Float[Array, "B N W"],
    summary: Summary,
    end: End,
    logq: Float[Array, "B N W"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draw each sequence's last token (`jspec.pallas.law.race_ref`), under `jax.shard_map`."""
    here = summary._replace(best=summary.best - part.first)
    refused = jnp.where(end.refused < 0, -1, _local(part, end.refused))
    logp, weights = laws.left(policy, x, here, end._replace(refused=refused), logq)
    noise = jax.vmap(lambda key: _noise(part, key))(end.key)

    def runner(weights: Array) -> list[Array]:
        """The best of the slice: score, id, log p."""
        score = weights + noise
        own = keys.best(score)[:, None]
        score, logp_of = (jnp.take_along_axis(of, own, axis=1)[:, 0] for of in (score, logp))
        return [score, (part.first + own[:, 0]).astype(jnp.float32), logp_of]

    ours = jnp.stack(runner(weights) + runner(logp), axis=-1)
    mine = (jnp.arange(part.shards) == jax.lax.axis_index(part.axis))[:, None, None]
    all_of_them = jax.lax.psum(jnp.where(mine, ours, 0), part.axis)  # [shards, B, 6]
    some = jnp.any(all_of_them[..., 0] > -jnp.inf, axis=0)[:, None]
    final = jnp.where(some, all_of_them[..., :3], all_of_them[..., 3:])
    winner = jnp.argmax(final[..., 0], axis=0)  # of equal ones the first shard's, as the lowest id wins
    _, token, logp_of = jnp.take_along_axis(final, winner[None, :, None], axis=0)[0].T
    return token.astype(jnp.int32), logp_of


def _noise(part: Slice, key: UInt32[Array, "2"]) -> Float[Array, "W"]:
    """The slice's part of `keys.gumbel`: a word of `jax.random.bits` is what folding in its
    index gives, both halves combined."""

    def word(index: Array) -> Array:
        halves = jax.random.key_data(jax.random.fold_in(keys.wrap(key), index))
        return halves[0] ^ halves[1]

    ids = (part.first + jnp.arange(part.width)).astype(jnp.uint32)
    return keys.gumbel_of_bits(jax.vmap(word)(ids), jax.vmap(word)(ids + jnp.uint32(part.vocab)))


def _block(part: Slice, round: fused.Round, reads: fused.Reads, depth: int) -> Verdict:
    """The block rule. Its race depends on its sums, and would be a step more: instead every
    node's race is run beside the sums (noise for N rows, not for one)."""
    proposal, nodes = round.proposal, jnp.arange(round.logp.shape[1])
    reach = jax.vmap(verify.reach_of)(round.logp - round.log_q, proposal.count)

    rows = laws.law(round.policy, round.summary._replace(best=round.summary.best - part.first), round.x)
    child = jnp.minimum(nodes + 1, nodes.size - 1)
    point = (jnp.arange(part.width) == _local(part, proposal.tokens)[..., None]).astype(jnp.float32)
    q = jnp.where(round.drawn[..., None], jnp.exp(proposal.logq), point)[:, child]
    total = jnp.sum(jnp.maximum(jnp.exp(rows + reach[..., None]) - q, 0.0), axis=-1)
    chance = jax.vmap(verify.block_chances)(proposal, jax.lax.psum(total, part.axis), reach)

    def draw(node: Array) -> tuple[Array, Array]:
        end = fused.end_at(round, reach, jnp.full_like(round.position, node))
        return reads.race(round.policy, round.x, round.summary, end, proposal.logq)

    tokens, logp = reads.each(draw, nodes)

    def drawn_already(policy: Any, x: Any, summary: Any, end: End, logq: Any) -> tuple[Array, Array]:
        return tuple(jnp.take_along_axis(of.T, end.node[:, None], axis=1)[:, 0] for of in (tokens, logp))

    return fused.random(round, drawn_already, chance, reach, depth)
