"""The walk: a rule's coins are thrown, and each row goes down its draft until one fails.

A chain is judged whole: the law of all its nodes is computed at once. In a tree the law,
with its temperature and truncation, is computed only at the nodes that the walk visits,
one level after the other; so its cost is that of a path, whatever the tree's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.sampling import keys, policy, siblings
from jspec.sampling.verify import Verifier, check_legal
from jspec.types import Proposal, Verdict

Law = Callable[[Int[Array, "B"] | None], Float[Array, "B N V"]]
"""log p after one node of each row, [B, 1, V], or, for None, after all, [B, N, V]."""


def decide(
    verifier: Verifier,
    settings: policy.Policy,
    history: policy.History,
    key: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    proposal: Proposal,
    logits: Float[Array, "B N V"],
    depth: int,
) -> Verdict:
    """From the target's logits to the verdict, in plain jnp: the ``decide`` of `jspec.make_decoder`.

    `jspec.pallas.verify` makes others of the same signature. For the rest see `verify`.
    """

    def law(node: Array | None) -> Array:
        if node is None:
            return policy.apply(settings, history, proposal.tokens, proposal.tree, logits)
        row = jnp.arange(node.shape[0])
        layout = jax.tree.map(lambda part: part[row, node][:, None], proposal.tree)
        return policy.apply(settings, history, proposal.tokens, layout, logits[row, node][:, None])

    return verify(verifier, key, position, proposal, law, depth)


def verify(
    verifier: Verifier,
    key: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    proposal: Proposal,
    law: Law,
    depth: int,
) -> Verdict:
    """Decide every row by its own key, for the round whose root stands at ``position``.

    ``law`` gives log-probabilities in float32; ``depth`` is the tree's, static. A draft is
    kept iff u < accept, u in [0, 1), so that one of chance 0 never is.

    A node whose law is no law (its greatest weight is not finite: NaN, +inf, or all
    -inf) ends the walk and leaves ``ok`` False; what was accepted before it stands.

    Raises:
        JspecError: the proposal is a tree and the rule judges only chains.

    >>> from jspec import tree
    >>> from jspec.sampling.verify import token
    >>> law, root = jnp.log(jnp.array([[[0.5, 0.5, 0.0]]])), jnp.array([[0]])
    >>> alone = Proposal(root, tree.chain(1, 1), jnp.array([1]))
    >>> key = keys.row_keys([3], 1)
    >>> [int(verify(token, key, jnp.array([at]), alone, lambda _: law, 0).tokens[0, 0]) for at in range(5)]
    [0, 1, 0, 1, 1]
    """
    check_legal(verifier, "chain" if proposal.tree.mask is None else "tree")
    coins = jnp.zeros(proposal.tokens.shape)
    if verifier.random:
        coins = coins_of(key, position, proposal.tokens.shape[1])
    decide = _chain if proposal.tree.mask is None else _descend
    return decide(verifier, key, position, proposal, law, depth, coins)


def coins_of(key: UInt32[Array, "B 2"], position: Int[Array, "B"], nodes: int) -> Float[Array, "B N"]:
    """The uniform number in [0, 1) that each node is judged by."""

    def coin(row_key: Array, position: Array, node: Array) -> Array:
        return jax.random.uniform(keys.fold(row_key, position, keys.ACCEPT, node))

    return jax.vmap(jax.vmap(coin, (None, None, 0)), (0, 0, None))(key, position, jnp.arange(nodes))


def _next(verifier: Verifier, key: Array, position: Array, last: Array, weights: Array) -> Int[Array, "B"]:
    if not verifier.random:
        return keys.best(weights)
    use = jax.vmap(keys.fold, (0, 0, None, 0))(key, position, keys.NEXT, last)
    return keys.draw_each(use, weights)


def _chain(
    verifier: Verifier, key: Array, position: Array, proposal: Proposal, law: Law, depth: int, coins: Array
) -> Verdict:
    """All nodes at once; the path is the nodes' own order."""
    rows = law(None)
    good = jnp.isfinite(jnp.max(rows, axis=-1))
    # It ends with its first bad law, also for rules that look ahead.
    proposal = proposal._replace(count=jnp.minimum(proposal.count, 1 + jnp.cumprod(good, 1).sum(1)))
    judged = jax.vmap(verifier.prepare)(key, position[:, None] + proposal.tree.depth + 1, rows)
    real = jnp.arange(rows.shape[1]) < proposal.count[:, None]
    passed = (coins < jax.vmap(verifier.accept)(proposal, judged)) & real
    accepted = jnp.cumprod(passed[:, 1:], axis=1).sum(axis=1)
    path = jnp.arange(depth + 1)
    path = jnp.where(path <= accepted[:, None], path, 0)
    following = _next(
        verifier, key, position, accepted, jax.vmap(verifier.residual)(proposal, judged, accepted)
    )
    drafts = jnp.roll(proposal.tokens, -1, axis=1)
    tokens = jnp.where(jnp.arange(depth + 1) == accepted[:, None], following[:, None], drafts)
    logprob = jnp.take_along_axis(rows, tokens[:, :, None], axis=2)[:, :, 0]
    ok = jnp.take_along_axis(good, accepted[:, None], axis=1)[:, 0]
    return Verdict(path, accepted, tokens, logprob, ok)


class _Walk(NamedTuple):
    """Where each row stands. ``moving``: it came to a new node, whose law is not known yet."""

    step: Int[Array, ""]
    node: Int[Array, "B"]
    law: Float[Array, "B V"]  # at the node, once visited
    moving: Bool[Array, "B"]
    verdict: Verdict


def _descend(
    verifier: Verifier, key: Array, position: Array, proposal: Proposal, law: Law, depth: int, coins: Array
) -> Verdict:
    """Level by level: the law at the node, the star of its children, the first that passes."""
    batch = jnp.arange(proposal.tokens.shape[0])

    def here(node: Array, row: Array) -> tuple[Proposal, Array]:
        at = position + proposal.tree.depth[batch, node] + 1
        return jax.vmap(siblings.star)(proposal, node), jax.vmap(verifier.prepare)(
            key, at[:, None], row[:, None]
        )

    def visit(walk: _Walk) -> _Walk:
        row = jnp.where(walk.moving[:, None], law(walk.node)[:, 0], walk.law)
        good = jnp.isfinite(jnp.max(row, axis=-1))
        stars, judged = here(walk.node, row)
        passed = (coins < jax.vmap(verifier.accept)(stars, judged)) & jax.vmap(siblings.children)(stars)
        moving = jnp.any(passed, axis=1) & walk.moving & good
        child = jnp.argmax(passed, axis=1).astype(jnp.int32)
        # A row that has ended writes zeros, whatever its neighbours still do.
        token = jnp.where(moving, proposal.tokens[batch, child], 0)
        old, at = walk.verdict, walk.step
        verdict = Verdict(
            old.path.at[:, at + 1].set(jnp.where(moving, child, 0), mode="drop"),
            old.accepted + moving,
            old.tokens.at[:, at].set(token),
            old.logprob.at[:, at].set(jnp.where(moving, row[batch, token], 0.0)),
            good,
        )
        return _Walk(at + 1, jnp.where(moving, child, walk.node), row, moving, verdict)

    root = jnp.zeros_like(position)
    shape = jax.eval_shape(law, root)
    empty = jnp.zeros((batch.shape[0], depth + 1), jnp.int32)
    everywhere = jnp.ones(batch.shape, bool)
    start = Verdict(
        empty, root, empty.astype(proposal.tokens.dtype), empty.astype(shape.dtype), ok=everywhere
    )
    nothing = jnp.zeros((batch.shape[0], shape.shape[-1]), shape.dtype)
    walk = _Walk(jnp.int32(0), root, nothing, everywhere, start)
    walk = jax.lax.while_loop(lambda walk: jnp.any(walk.moving), visit, walk)
    stars, judged = here(walk.node, walk.law)
    weights = jax.vmap(verifier.residual)(stars, judged, root)
    following = _next(verifier, key, position, walk.node, weights).astype(proposal.tokens.dtype)
    end = batch, walk.verdict.accepted
    return walk.verdict._replace(
        tokens=walk.verdict.tokens.at[end].set(following),
        logprob=walk.verdict.logprob.at[end].set(walk.law[batch, following]),
    )
