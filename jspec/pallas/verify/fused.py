"""Fused verification: from logits to the verdict without an array of probabilities.

`make` turns the two passes of `jspec.pallas.verify.reference`, as kernels or as their references, into
a ``decide`` for `jspec.make_decoder`. It gives the verdicts of `jspec.sampling.walk.decide`
up to rounding, for every verifier and draft:

* `greedy` and `coupled`: one token may follow each node; a draft is kept iff it is that.
* `token`, on chains and on trees of point masses: the chances need p and q at the drafted
  tokens alone; then one Gumbel argmax over what is left at the node where the walk ends.
* `block` on chains: its sums over max(P p - q, 0) are a second sweep over the rows, which XLA
  does without writing them out.
* anything else (drawn siblings, lossy verifiers, verifiers of one's own) goes by
  `jspec.sampling.walk`, with the distribution of the nodes that the walk visits.

Bias, penalties and the ban on early stops need whole adjusted rows and are XLA's; in a
round that uses none of them no copy of the logits is made. The passes know the settings
`KNOWN_FIELDS`; a round in which a row uses another one from the temperature on, such as that of a
step in `distribution.AFTER_TEMPERATURE`, is judged by plain code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.pallas.verify import reference
from jspec.pallas.verify.reference import LastDraw, RowStats
from jspec.sampling import distribution, keys, siblings, truncate, verifiers, walk
from jspec.sampling.policy import neutral
from jspec.sampling.verifiers.block import log_reach
from jspec.sampling.verifiers.token import chain_chances
from jspec.types import History, Policy, Proposal, Verdict, Verifier

log = logging.getLogger(__name__)

RowStatsPass = Callable[[Policy, Array], RowStats]
GumbelArgmaxPass = Callable[[Policy, Array, RowStats, LastDraw, Array | None], tuple[Array, Array]]


def _entry(x: Float[Array, "B N V"], node: Int[Array, "B M"], token: Int[Array, "B M"]) -> Array:
    batch, nodes, vocab = x.shape
    row = nodes * jnp.arange(batch)[:, None] + node
    # As rows of one matrix, which is what the kernels see: else TPUs would lay the logits out anew.
    return x.reshape(batch * nodes, vocab)[row, token].astype(jnp.float32)


@dataclass(frozen=True, eq=False)
class Reads:
    """The functions that read rows as wide as the vocabulary; `jspec.sharding.verify` has others."""

    stats_and_entries: Callable[..., tuple[RowStats, Any]]  # (policy, x, entries) -> stats, entries()
    gumbel_argmax: GumbelArgmaxPass
    entry: Callable[..., Array] = _entry  # (x, node, token) -> one logit each, [B, M]
    greatest: Callable[[Array], Array] = siblings.greatest  # of each row; not finite where it has NaN or +inf
    each: Callable[..., Any] = jax.lax.map  # (a draw, nodes) -> the draws of all of them
    block: Callable[..., Verdict] | None = None  # the block verifier, where it has a form of its own


class Round(NamedTuple):
    """What fused verification reads: the data of one round, all of it arrays."""

    policy: Policy
    key: UInt32[Array, "B 2"]
    position: Int[Array, "B"]
    proposal: Proposal
    x: Float[Array, "B N V"]
    stats: RowStats
    good: Bool[Array, "B N"]  # rows that are distributions
    logp: Float[Array, "B N"]  # of each node's own token at its parent
    drawn: Bool[Array, "B N"]  # nodes drawn from a distribution, not point masses
    log_q: Float[Array, "B N"]  # of each node's own token; 0 for a point mass


def make(
    row_stats: RowStatsPass = reference.row_stats_ref,
    gumbel_argmax: GumbelArgmaxPass = reference.gumbel_argmax_ref,
) -> Callable[..., Verdict]:
    """Build a ``decide`` with the signature of `jspec.sampling.walk.decide` from the two passes.

    ``decide`` takes logits [B, N, V] in float32 or bfloat16 and raises `JspecError` for a tree where
    the verifier judges only chains.

    >>> from jspec import tree
    >>> from jspec.sampling import policy
    >>> one = jnp.array([1])
    >>> history = History(jnp.array([[2, 0]]), one, one, jnp.array([[-1]]))
    >>> draft = Proposal(jnp.array([[2, 1]]), tree.chain(1, 2), jnp.array([2]))
    >>> given = policy.greedy(1, 3), history, keys.row_keys([7], 1), one, draft, jnp.eye(3)[None, 1:]
    >>> make()(verifiers.greedy, *given, 1).tokens.tolist()  # the draft, and what follows it
    [[1, 2]]
    """
    # Lowered once, however often a program calls them.
    row_stats, gumbel_argmax = jax.jit(row_stats), jax.jit(gumbel_argmax)

    def stats_and_entries(policy: Policy, x: Array, entries: Callable[[], Any]) -> tuple[RowStats, Any]:
        return row_stats(policy, x), entries()

    reads = Reads(stats_and_entries, gumbel_argmax)

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
        verifiers.check_legal(verifier, "chain" if proposal.tree.mask is None else "tree")
        proposal = siblings.without_foreign_ids(proposal, logits.shape[-1])

        def judge(x: Array) -> Verdict:
            return judge_by(reads, verifier, policy, key, position, proposal, x, depth)

        def adjusted() -> Verdict:
            return judge(
                distribution.adjust(
                    policy, history, proposal.tokens, proposal.tree, logits.astype(jnp.float32)
                )
            )

        def fused() -> Verdict:
            # The whole judgement in both branches: a conditional that gives logits would copy them.
            changed = distribution.is_adjusted(policy, history, proposal.tree)
            return jax.lax.cond(changed, adjusted, lambda: judge(logits))

        def plain() -> Verdict:
            return walk.decide(verifier, policy, history, key, position, proposal, logits, depth)

        return or_plain_where_in_use(unknown_fields(), policy, fused, plain)

    return decide


KNOWN_FIELDS = frozenset({"temperature", "top_k", "top_p", "min_p"})
"""Fields of `Policy` that the two passes read. The steps before the temperature are XLA's."""


def unknown_fields() -> list[str]:
    """Fields that the distribution reads from the temperature on, and the passes do not."""
    of_steps = [name for step in distribution.AFTER_TEMPERATURE for name in step.fields]
    return of_steps + [name for name in distribution.TEMPERATURE_TO_MIN_P if name not in KNOWN_FIELDS]


def or_plain_where_in_use(
    fields: Sequence[str], policy: Policy, fused: Callable[[], Verdict], plain: Callable[[], Verdict]
) -> Verdict:
    """``fused()``, but ``plain()`` in a round where a row uses one of the fields, and the log says so."""
    if not fields:
        return fused()
    names = ", ".join(dict.fromkeys(fields))
    log.warning("verification is plain in rounds where a row uses %s: its fused form does not know it", names)
    used = truncate.any_of(*(getattr(policy, name) != neutral(name) for name in fields))
    return jax.lax.cond(used, plain, fused)


def judge_by(
    reads: Reads,
    verifier: Verifier,
    policy: Policy,
    key: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    proposal: Proposal,
    x: Float[Array, "B N V"],
    depth: int,
) -> Verdict:
    """The verdict on adjusted logits."""
    judge = fused_form(verifier, proposal)
    if judge is None:
        reason = "drawn siblings" if verifier is verifiers.token else "it has no fused form"
        log.info("the verifier %r is judged by plain code, node by node: %s", verifier.name, reason)
        stats, _ = reads.stats_and_entries(policy, x, lambda: None)

        def rows(node: Array | None) -> Array:
            if node is None:
                return reference.log_probs(policy, stats, x)
            row = jnp.arange(node.shape[0])
            return reference.log_probs(
                policy, *jax.tree.map(lambda part: part[row, node][:, None], (stats, x))
            )

        return walk.verify(verifier, key, position, proposal, rows, depth)
    return judge(round_of(reads, policy, key, position, proposal, x), reads, depth)


def round_of(
    reads: Reads, policy: Policy, key: Array, position: Array, proposal: Proposal, x: Array
) -> Round:
    """Read the logits: each row's distribution, and the entries of the drafted tokens."""
    above = jnp.clip(proposal.tree.parent, 0)
    stats, (own, drawn, log_q) = reads.stats_and_entries(
        policy, x, lambda: _entries(reads, proposal, x, above)
    )
    good = jnp.isfinite(stats.top)
    if proposal.tree.mask is None:
        proposal = walk.cut_at_bad_row(proposal, good)
    logp = _at(policy, stats, own, above, proposal.tokens)
    return Round(policy, key, position, proposal, x, stats, good, logp, drawn, log_q)


def _entries(reads: Reads, proposal: Proposal, x: Array, above: Array) -> tuple[Array, Array, Array]:
    """Of each node's own token: the logit at its parent; whether it was drawn from a distribution
    (`siblings.has_distribution`), and log q of that."""
    own = reads.entry(x, above, proposal.tokens)
    if proposal.logq is None:
        return own, jnp.zeros(own.shape, bool), jnp.zeros(own.shape)
    nodes = jnp.broadcast_to(jnp.arange(own.shape[1]), own.shape)
    q = reads.entry(proposal.logq, nodes, proposal.tokens)
    drawn = jnp.isfinite(reads.greatest(proposal.logq)) & (q > -jnp.inf)
    return own, drawn, jnp.where(drawn, q, 0.0)


def fused_form(verifier: Verifier, proposal: Proposal) -> Callable[..., Verdict] | None:
    """A verifier's form that needs no rows of probabilities; None: it has none."""
    points, chain = proposal.logq is None, proposal.tree.mask is None
    if verifier is verifiers.greedy:
        return _greedy
    if verifier is verifiers.coupled:
        return _coupled
    if verifier is verifiers.token and (points or chain):
        return _token
    if verifier is verifiers.block and chain:
        return _token if points else _block
    return None


def _at(policy: Policy, stats: RowStats, own: Array, node: Array, token: Array) -> Float[Array, "B M"]:
    """log p of single tokens, each at a node of its row, from their logits."""
    row = jnp.arange(own.shape[0])[:, None]
    there = RowStats(*(part[row, node] for part in stats))
    return reference.log_probs(policy, there, own[..., None], token[..., None])[..., 0]


def _greedy(round: Round, reads: Reads, depth: int) -> Verdict:
    top, _, log_total, best = round.stats  # of the greatest logit log p is - log_total, or 0
    return _following(
        round, best, jnp.where((round.policy.temperature > 0)[:, None], -log_total, 0 * top), depth
    )


def _coupled(round: Round, reads: Reads, depth: int) -> Verdict:
    """Every node draws with the noise of its position: one Gumbel argmax for each."""
    position = round.position[:, None] + round.proposal.tree.depth + 1
    coupled = keys.coupled_keys(round.key)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    words = jax.random.key_data(fold(keys.wrap(coupled), position))
    batch, nodes = position.shape

    def draw(node: Array) -> tuple[Array, Array]:
        last = LastDraw(
            jnp.full((batch,), node),
            words[:, node],
            jnp.full((batch, 1), -1),
            jnp.full((batch,), -1),
            jnp.zeros(batch),
        )
        return reads.gumbel_argmax(round.policy, round.x, round.stats, last, None)

    following, logp = reads.each(draw, jnp.arange(nodes))
    return _following(round, following.T, logp.T, depth)


def _following(round: Round, following: Int[Array, "B N"], logp: Float[Array, "B N"], depth: int) -> Verdict:
    """The verdict where one token may follow each node, given with its log p."""
    proposal = round.proposal
    passed = proposal.tokens == jnp.take_along_axis(following, jnp.clip(proposal.tree.parent, 0), axis=1)
    walked = _descend(round, passed, depth)
    token, logp = (_at_end(part, walked) for part in (following, logp))
    return _verdict(round, walked, token, logp)


def _token(round: Round, reads: Reads, depth: int) -> Verdict:
    return walk_by_chances(round, reads.gumbel_argmax, *token_chances(round), depth)


def token_chances(round: Round) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Each node's chance when the walk stands at its parent, and the logarithm of its reach."""
    proposal = round.proposal
    if proposal.tree.mask is None:
        chance = chain_chances(round.logp - round.log_q)
    else:
        parent = jnp.where(walk.real_nodes(proposal), proposal.tree.parent, -1)
        chance = jax.vmap(siblings.point_chances)(proposal.tokens, parent, jnp.exp(round.logp))
    return chance, jnp.zeros_like(round.logp)


def _block(round: Round, reads: Reads, depth: int) -> Verdict:
    if reads.block is not None:
        return reads.block(round, reads, depth)
    return walk_by_chances(round, reads.gumbel_argmax, *block_chances(round), depth)


def block_chances(round: Round) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """What `token_chances` gives, for the block verifier, from whole rows."""
    rows = reference.log_probs(round.policy, round.stats, round.x)
    chance = jax.vmap(verifiers.block.accept)(round.proposal, rows)
    return chance, jax.vmap(log_reach)(round.proposal, rows)


def walk_by_chances(
    round: Round, gumbel_argmax: GumbelArgmaxPass, chance: Array, reach: Array, depth: int
) -> Verdict:
    """Throw the uniform numbers, walk, and draw what ends the round."""
    proposal = round.proposal
    uniforms = walk.uniforms_for(round.key, round.position, proposal.tokens.shape[1])
    walked = _descend(round, uniforms < chance, depth)
    last = last_draw(round, reach, walked.end)
    return _verdict(round, walked, *gumbel_argmax(round.policy, round.x, round.stats, last, proposal.logq))


def last_draw(round: Round, reach: Float[Array, "B N"], end: Int[Array, "B"]) -> LastDraw:
    """What is drawn from if the walk ends at these nodes."""
    proposal = round.proposal
    words = jax.random.key_data(
        jax.vmap(keys.fold, (0, 0, None, 0))(round.key, round.position, keys.NEXT, end)
    )
    below = (proposal.tree.parent == end[:, None]) & walk.real_nodes(proposal)
    drawn = round.drawn & below  # of a chain one child at most
    child = jnp.where(jnp.any(drawn, axis=1), jnp.argmax(drawn, axis=1), -1)
    refused = jnp.where(below & ~drawn, proposal.tokens, -1)
    if proposal.tree.mask is None:
        refused = jnp.max(refused, axis=1, keepdims=True)
    own = jnp.take_along_axis(reach, end[:, None], axis=1)[:, 0]
    return LastDraw(end, words, refused, child, own)


def _descend(round: Round, passed: Bool[Array, "B N"], depth: int) -> walk.Walked:
    passed &= walk.real_nodes(round.proposal)
    batch = jnp.arange(passed.shape[0])

    def visit(carry: Any, node: Array, moving: Array) -> tuple[Any, Array, Array]:
        return carry, passed, round.good[batch, node]

    return walk.descend(round.proposal.tree.parent, depth, visit)[0]


def _at_end(values: Array, walked: walk.Walked) -> Array:
    return jnp.take_along_axis(values, walked.end[:, None], axis=1)[:, 0]


def _verdict(round: Round, walked: walk.Walked, token: Array, logp: Array) -> Verdict:
    good = _at_end(round.good, walked)
    return walk.make_verdict(round.proposal, walked, round.logp, token, logp, good)
