"""Fused verification: from logits to the verdict without an array of probabilities.

`make` turns the two passes of `jspec.pallas.law`, as kernels or as their references, into
a ``decide`` for `jspec.make_decoder`. It gives the verdicts of `jspec.sampling.walk.decide`
up to rounding, for every rule and draft:

* `greedy` and `coupled`: each row has one following token; a draft is kept iff it is that.
* `token`, on chains and on trees of point masses: the chances need p and q at the drafted
  tokens alone; then one race over what is left at the node where the walk ends.
* `block` on chains: its sums over max(P p - q, 0) are a second sweep over the rows, which XLA
  does without writing them out.
* anything else (drawn siblings, lossy rules, rules of one's own) goes by
  `jspec.sampling.walk`, with the law of the nodes that the walk visits.

Bias, penalties and the ban on early stops need whole adjusted rows and are XLA's; in a
round that uses none of them no copy of the logits is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.pallas import law as laws
from jspec.pallas.law import End, Summary
from jspec.sampling import keys, siblings, verify, walk
from jspec.sampling import policy as target_law
from jspec.sampling.policy import History, Policy
from jspec.sampling.verify import Verifier
from jspec.types import Proposal, Verdict

log = logging.getLogger(__name__)

Summarise = Callable[[Policy, Array], Summary]
Race = Callable[[Policy, Array, Summary, End, Array | None], tuple[Array, Array]]


def _entry(x: Float[Array, "B N V"], node: Int[Array, "B M"], token: Int[Array, "B M"]) -> Array:
    batch, nodes, vocab = x.shape
    row = nodes * jnp.arange(batch)[:, None] + node
    # As rows of one matrix, which is what the kernels see: else TPUs would lay the logits out anew.
    return x.reshape(batch * nodes, vocab)[row, token].astype(jnp.float32)


@dataclass(frozen=True, eq=False)
class Reads:
    """All that reads rows as wide as the vocabulary, as values: `jspec.pallas.sharded` has its own."""

    survey: Callable[..., tuple[Summary, Any]]  # (policy, x, entries) -> the summary, entries()
    race: Race
    entry: Callable[..., Array] = _entry  # (x, node, token) -> one logit each, [B, M]
    greatest: Callable[[Array], Array] = siblings.worst  # of each row; not finite where it has NaN or +inf
    each: Callable[..., Any] = jax.lax.map  # (a race, nodes) -> the races of all of them
    block: Callable[..., Verdict] | None = None  # the block rule, where it has a form of its own


class Round(NamedTuple):
    """What the rules look at: one round's data, arrays all."""

    policy: Policy
    key: UInt32[Array, "B 2"]
    position: Int[Array, "B"]
    proposal: Proposal
    x: Float[Array, "B N V"]
    summary: Summary
    good: Bool[Array, "B N"]  # rows that are laws
    logp: Float[Array, "B N"]  # of each node's own token at its parent
    drawn: Bool[Array, "B N"]  # nodes drawn from a law, not point masses
    log_q: Float[Array, "B N"]  # of each node's own token; 0 for a point mass


def make(summarise: Summarise = laws.summarise_ref, race: Race = laws.race_ref) -> Callable[..., Verdict]:
    """Build a ``decide`` with the signature of `jspec.sampling.walk.decide` from the two passes."""
    summarise, race = jax.jit(summarise), jax.jit(race)  # lowered once, however often a program calls them

    def survey(policy: Policy, x: Array, entries: Callable[[], Any]) -> tuple[Summary, Any]:
        return summarise(policy, x), entries()

    reads = Reads(survey, race)

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

        def judge(x: Array) -> Verdict:
            return judge_by(reads, verifier, policy, key, position, proposal, x, depth)

        def adjusted() -> Verdict:
            return judge(
                target_law.adjust(policy, history, proposal.tokens, proposal.tree, logits.astype(jnp.float32))
            )

        # The whole judgement in both branches: a conditional that gives logits would copy them.
        changed = target_law.is_adjusted(policy, history, proposal.tree)
        return jax.lax.cond(changed, adjusted, lambda: judge(logits))

    return decide


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
    rule = rule_of(verifier, proposal)
    if rule is None:
        reason = "drawn siblings" if verifier is verify.token else "it has no fused form"
        log.info("the rule %r is judged by plain code, node by node: %s", verifier.name, reason)
        summary, _ = reads.survey(policy, x, lambda: None)

        def rows(node: Array | None) -> Array:
            if node is None:
                return laws.law(policy, summary, x)
            row = jnp.arange(node.shape[0])
            return laws.law(policy, *jax.tree.map(lambda part: part[row, node][:, None], (summary, x)))

        return walk.verify(verifier, key, position, proposal, rows, depth)
    return rule(round_of(reads, policy, key, position, proposal, x), reads, depth)


def round_of(
    reads: Reads, policy: Policy, key: Array, position: Array, proposal: Proposal, x: Array
) -> Round:
    """Read the rows: their laws, and the entries of the drafted tokens."""
    above = jnp.clip(proposal.tree.parent, 0)
    summary, (own, drawn, log_q) = reads.survey(policy, x, lambda: _entries(reads, proposal, x, above))
    good = jnp.isfinite(summary.top)
    if proposal.tree.mask is None:  # it ends with its first bad law, also for rules that look ahead
        proposal = proposal._replace(count=jnp.minimum(proposal.count, 1 + jnp.cumprod(good, 1).sum(1)))
    logp = _at(policy, summary, own, above, proposal.tokens)
    return Round(policy, key, position, proposal, x, summary, good, logp, drawn, log_q)


def _entries(reads: Reads, proposal: Proposal, x: Array, above: Array) -> tuple[Array, Array, Array]:
    """Of each node's own token: the logit at its parent; whether it was drawn from a law
    (`siblings.has_law`), and log q of that."""
    own = reads.entry(x, above, proposal.tokens)
    if proposal.logq is None:
        return own, jnp.zeros(own.shape, bool), jnp.zeros(own.shape)
    nodes = jnp.broadcast_to(jnp.arange(own.shape[1]), own.shape)
    q = reads.entry(proposal.logq, nodes, proposal.tokens)
    drawn = jnp.isfinite(reads.greatest(proposal.logq)) & (q > -jnp.inf)
    return own, drawn, jnp.where(drawn, q, 0.0)


def rule_of(verifier: Verifier, proposal: Proposal) -> Callable[..., Verdict] | None:
    """How a rule is judged without rows of probabilities; None: there is no way."""
    points, chain = proposal.logq is None, proposal.tree.mask is None
    if verifier is verify.greedy:
        return _greedy
    if verifier is verify.coupled:
        return _coupled
    if verifier is verify.token and (points or chain):
        return _token
    if verifier is verify.block and chain:
        return _token if points else _block
    return None


def _at(policy: Policy, summary: Summary, own: Array, node: Array, token: Array) -> Float[Array, "B M"]:
    """log p of single tokens, each at a node of its row, from their logits."""
    row = jnp.arange(own.shape[0])[:, None]
    there = Summary(*(part[row, node] for part in summary))
    return laws.law(policy, there, own[..., None], token[..., None])[..., 0]


def _greedy(round: Round, reads: Reads, depth: int) -> Verdict:
    top, _, log_total, best = round.summary  # of the greatest logit log p is - log_total, or 0
    return _following(
        round, best, jnp.where((round.policy.temperature > 0)[:, None], -log_total, 0 * top), depth
    )


def _coupled(round: Round, reads: Reads, depth: int) -> Verdict:
    """Every node draws with the noise of its position: a race for each."""
    position = round.position[:, None] + round.proposal.tree.depth + 1
    coupled = keys.coupled_keys(round.key)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    words = jax.random.key_data(fold(keys.wrap(coupled), position))
    batch, nodes = position.shape

    def draw(node: Array) -> tuple[Array, Array]:
        end = End(
            jnp.full((batch,), node),
            words[:, node],
            jnp.full((batch, 1), -1),
            jnp.full((batch,), -1),
            jnp.zeros(batch),
        )
        return reads.race(round.policy, round.x, round.summary, end, None)

    following, logp = reads.each(draw, jnp.arange(nodes))
    return _following(round, following.T, logp.T, depth)


def _following(round: Round, following: Int[Array, "B N"], logp: Float[Array, "B N"], depth: int) -> Verdict:
    """The verdict where each node has one token that may follow it, with its log p."""
    proposal = round.proposal
    passed = proposal.tokens == jnp.take_along_axis(following, jnp.clip(proposal.tree.parent, 0), axis=1)
    path, accepted, end = _walk(round, passed, depth)
    token, logp = (jnp.take_along_axis(part, end[:, None], axis=1)[:, 0] for part in (following, logp))
    return _verdict(round, path, accepted, end, token, logp)


def _token(round: Round, reads: Reads, depth: int) -> Verdict:
    return random(round, reads.race, *token_chances(round), depth)


def token_chances(round: Round) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Each node's chance when the walk stands at its parent, and the logarithm of its reach."""
    proposal = round.proposal
    if proposal.tree.mask is None:
        chance = jnp.exp(jnp.minimum(round.logp - round.log_q, 0.0))
    else:
        parent = jnp.where(_real(proposal), proposal.tree.parent, -1)
        chance = jax.vmap(siblings.point_chances)(proposal.tokens, parent, jnp.exp(round.logp))
    return chance, jnp.zeros_like(round.logp)


def _block(round: Round, reads: Reads, depth: int) -> Verdict:
    if reads.block is not None:
        return reads.block(round, reads, depth)
    return random(round, reads.race, *block_chances(round), depth)


def block_chances(round: Round) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """The same of the block rule, from whole rows."""
    rows = laws.law(round.policy, round.summary, round.x)
    chance = jax.vmap(verify.block.accept)(round.proposal, rows)
    return chance, jax.vmap(verify.log_reach)(round.proposal, rows)


def _real(proposal: Proposal) -> Bool[Array, "B N"]:
    return jnp.arange(proposal.tokens.shape[1]) < proposal.count[:, None]


def random(round: Round, race: Race, chance: Array, log_reach: Array, depth: int) -> Verdict:
    """Throw the coins, walk, and draw what ends the round."""
    proposal = round.proposal
    coins = walk.coins_of(round.key, round.position, proposal.tokens.shape[1])
    path, accepted, end = _walk(round, coins < chance, depth)
    last = end_at(round, log_reach, end)
    final = race(round.policy, round.x, round.summary, last, proposal.logq)
    return _verdict(round, path, accepted, end, *final)


def end_at(round: Round, log_reach: Float[Array, "B N"], end: Int[Array, "B"]) -> End:
    """What is drawn from if the walk ends at these nodes."""
    proposal = round.proposal
    words = jax.random.key_data(
        jax.vmap(keys.fold, (0, 0, None, 0))(round.key, round.position, keys.NEXT, end)
    )
    below = (proposal.tree.parent == end[:, None]) & _real(proposal)
    drawn = round.drawn & below  # of a chain one child at most
    child = jnp.where(jnp.any(drawn, axis=1), jnp.argmax(drawn, axis=1), -1)
    refused = jnp.where(below & ~drawn, proposal.tokens, -1)
    if proposal.tree.mask is None:
        refused = jnp.max(refused, axis=1, keepdims=True)
    reach = jnp.take_along_axis(log_reach, end[:, None], axis=1)[:, 0]
    return End(end, words, refused, child, reach)


def _walk(
    round: Round, passed: Bool[Array, "B N"], depth: int
) -> tuple[Int[Array, "B P"], Int[Array, "B"], Int[Array, "B"]]:
    """Down from the root to the first child that passed, until none does or a law is bad."""
    passed &= _real(round.proposal)

    def down(carry, _):
        node, moving = carry
        child = passed & (round.proposal.tree.parent == node[:, None])
        good = jnp.take_along_axis(round.good, node[:, None], axis=1)[:, 0]
        moving &= jnp.any(child, axis=1) & good
        node = jnp.where(moving, jnp.argmax(child, axis=1), node)
        return (node, moving), jnp.where(moving, node, 0)

    root = jnp.zeros_like(round.position)
    (end, _), nodes = jax.lax.scan(down, (root, jnp.ones_like(root, bool)), length=depth)
    path = jnp.concatenate([root[None], nodes]).T
    return path, jnp.sum(path > 0, axis=1), end


def _verdict(round: Round, path: Array, accepted: Array, end: Array, token: Array, logp: Array) -> Verdict:
    """Move the path's own tokens one place up, and put the last one behind them."""
    index = jnp.arange(path.shape[1])

    def along(values: Array, last: Array) -> Array:
        own = jnp.roll(jnp.take_along_axis(values, path, axis=1), -1, axis=1)
        before, here = index < accepted[:, None], index == accepted[:, None]
        return jnp.where(before, own, jnp.where(here, last[:, None], 0).astype(own.dtype))

    ok = jnp.take_along_axis(round.good, end[:, None], axis=1)[:, 0]
    return Verdict(path, accepted, along(round.proposal.tokens, token), along(round.logp, logp), ok)
