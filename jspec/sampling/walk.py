"""The walk: uniform numbers are thrown, and each row goes down its draft until a node fails.

`descend` is the one way down, for chains and trees, for plain code and kernels
(`jspec.pallas.verify.fused`), and `make_verdict` the one way to say where it ended.

A chain is judged whole: the distribution after all its nodes is computed at once. In a tree it,
with its temperature and truncation, is computed only at the nodes that the walk visits,
one level after the other; so its cost is that of a path, whatever the tree's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.sampling import distribution, keys, siblings
from jspec.sampling.verifiers import check_legal
from jspec.types import History, Policy, Proposal, Verdict, Verifier

LogProbsAt = Callable[[Int[Array, "B"] | None], Float[Array, "B N V"]]
"""log p after one node of each row, [B, 1, V], or, for None, after all, [B, N, V]."""


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
    """From the target's logits to the verdict, in plain jnp: the ``decide`` of `jspec.make_decoder`.

    `jspec.pallas.verify.fused` makes others of the same signature. A draft whose id is no token is
    never kept. For the rest see `verify`.
    """
    proposal = siblings.without_foreign_ids(proposal, logits.shape[-1])

    def log_probs_at(node: Array | None) -> Array:
        if node is None:
            return distribution.log_probs(policy, history, proposal.tokens, proposal.tree, logits)
        row = jnp.arange(node.shape[0])
        layout = jax.tree.map(lambda part: part[row, node][:, None], proposal.tree)
        return distribution.log_probs(policy, history, proposal.tokens, layout, logits[row, node][:, None])

    return verify(verifier, key, position, proposal, log_probs_at, depth)


def verify(
    verifier: Verifier,
    key: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    proposal: Proposal,
    log_probs_at: LogProbsAt,
    depth: int,
) -> Verdict:
    """Decide every row by its own key, for the round whose root stands at ``position``.

    ``log_probs_at`` gives log-probabilities in float32; ``depth`` is the tree's, static. A draft is
    kept iff u < accept, u in [0, 1), so that one of chance 0 never is; all ids are tokens.

    A node whose logits are no distribution (the greatest weight is not finite: NaN, +inf, or all
    -inf) ends the walk and leaves ``ok`` False; what was accepted before it stands.

    Raises:
        JspecError: the proposal is a tree and the verifier judges only chains.

    >>> from jspec import tree
    >>> from jspec.sampling.verifiers import token
    >>> logp, root = jnp.log(jnp.array([[[0.5, 0.5, 0.0]]])), jnp.array([[0]])
    >>> alone = Proposal(root, tree.chain(1, 1), jnp.array([1]))
    >>> key = keys.row_keys([3], 1)
    >>> [int(verify(token, key, jnp.array([at]), alone, lambda _: logp, 0).tokens[0, 0]) for at in range(5)]
    [0, 1, 0, 1, 1]
    """
    check_legal(verifier, "chain" if proposal.tree.mask is None else "tree")
    uniforms = jnp.zeros(proposal.tokens.shape)
    if verifier.random:
        uniforms = uniforms_for(key, position, proposal.tokens.shape[1])
    judge = _chain if proposal.tree.mask is None else _tree
    return judge(verifier, key, position, proposal, log_probs_at, depth, uniforms)


def uniforms_for(key: UInt32[Array, "B 2"], position: Int[Array, "B"], nodes: int) -> Float[Array, "B N"]:
    """The uniform number in [0, 1) that each node is judged by."""

    def one(row_key: Array, position: Array, node: Array) -> Array:
        return jax.random.uniform(keys.fold(row_key, position, keys.ACCEPT, node), dtype=jnp.float32)

    each = jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))
    return each(key, position, jnp.arange(nodes, dtype=jnp.int32))


class Walked(NamedTuple):
    """Where the walk of each row went."""

    path: Int[Array, "B P"]  # nodes from the root on, then 0
    accepted: Int[Array, "B"]
    end: Int[Array, "B"]  # the last node


Visit = Callable[[Any, Array, Array], tuple[Any, Bool[Array, "B N"], Bool[Array, "B"]]]
"""``(carry, node, moving) -> (carry, passed, good)``: which nodes pass, and whether p at ``node`` is a
distribution. Only rows that are still ``moving`` count."""


def descend(parent: Int[Array, "B N"], depth: int, visit: Visit, carry: Any = ()) -> tuple[Walked, Any]:
    """Go from the root to the first child that passed, until none does, p is bad, or all rows stand.

    Every node of the path is visited, its end too.
    """

    def step(state: Any, _: None) -> tuple[Any, Array]:
        node, moving, carry = state
        carry, passed, good = visit(carry, node, moving)
        child = passed & (parent == node[:, None])
        moving &= jnp.any(child, axis=1) & good
        node = jnp.where(moving, jnp.argmax(child, axis=1).astype(node.dtype), node)
        return (node, moving, carry), jnp.where(moving, node, 0)

    root = jnp.zeros(parent.shape[:1], jnp.int32)
    # A length that is known, unlike a while loop's, costs a GPU's host no look at the condition.
    start = root, jnp.ones(root.shape, bool), carry
    (end, _, carry), nodes = jax.lax.scan(step, start, length=depth + 1)
    path = jnp.concatenate([root[None], nodes[:depth]]).T
    return Walked(path, jnp.sum(path > 0, axis=1, dtype=jnp.int32), end), carry


def make_verdict(
    proposal: Proposal,
    walked: Walked,
    logp: Float[Array, "B N"],
    token: Int[Array, "B"],
    token_logp: Float[Array, "B"],
    good: Bool[Array, "B"],
) -> Verdict:
    """The verdict on a walk: the path's own tokens, one place up, and behind them the one that ends it.

    ``logp``: of each node's own token at its parent; ``good``: of the row where the walk ended.
    """
    index = jnp.arange(walked.path.shape[1])

    def along(values: Array, last: Array) -> Array:
        own = jnp.roll(jnp.take_along_axis(values, walked.path, axis=1), -1, axis=1)
        before, here = index < walked.accepted[:, None], index == walked.accepted[:, None]
        return jnp.where(before, own, jnp.where(here, last[:, None], 0).astype(own.dtype))

    tokens, logprob = along(proposal.tokens, token), along(logp, token_logp)
    return Verdict(walked.path, walked.accepted, tokens, logprob, good)


def _next(verifier: Verifier, key: Array, position: Array, last: Array, weights: Array) -> Int[Array, "B"]:
    if not verifier.random:
        return keys.best(weights)
    use = jax.vmap(keys.fold, (0, 0, None, 0))(key, position, keys.NEXT, last)
    return keys.draw_each(use, weights)


def cut_at_bad_row(proposal: Proposal, good: Bool[Array, "B N"]) -> Proposal:
    """A chain ends with its first row that is no distribution, also for verifiers that look ahead."""
    leading = 1 + jnp.sum(jnp.cumprod(good, axis=1), axis=1)
    return proposal._replace(count=jnp.minimum(proposal.count, leading).astype(proposal.count.dtype))


def real_nodes(proposal: Proposal) -> Bool[Array, "B N"]:
    """Which nodes are not padding."""
    return jnp.arange(proposal.tokens.shape[1]) < proposal.count[:, None]


def _chain(
    verifier: Verifier,
    key: Array,
    position: Array,
    proposal: Proposal,
    log_probs_at: LogProbsAt,
    depth: int,
    uniforms: Array,
) -> Verdict:
    """All nodes at once."""
    rows = log_probs_at(None)
    good = jnp.isfinite(jnp.max(rows, axis=-1))
    proposal = cut_at_bad_row(proposal, good)
    judged = jax.vmap(verifier.prepare)(key, position[:, None] + proposal.tree.depth + 1, rows)
    passed = (uniforms < jax.vmap(verifier.accept)(proposal, judged)) & real_nodes(proposal)
    batch = jnp.arange(rows.shape[0])
    walked, _ = descend(
        proposal.tree.parent, depth, lambda carry, node, moving: (carry, passed, good[batch, node])
    )
    weights = jax.vmap(verifier.residual)(proposal, judged, walked.end)
    token = _next(verifier, key, position, walked.end, weights)
    above = jnp.clip(proposal.tree.parent, 0)
    logp = rows[batch[:, None], above, proposal.tokens]
    return make_verdict(
        proposal, walked, logp, token, rows[batch, walked.end, token], good[batch, walked.end]
    )


class _Visited(NamedTuple):
    """What the walk has seen of a tree."""

    row: Float[Array, "B V"]  # log p after the newest node
    good: Bool[Array, "B"]
    logp: Float[Array, "B N"]  # of each node's own token, at parents that were visited


def _tree(
    verifier: Verifier,
    key: Array,
    position: Array,
    proposal: Proposal,
    log_probs_at: LogProbsAt,
    depth: int,
    uniforms: Array,
) -> Verdict:
    """Level by level: p at the node, its children, the first that passes."""
    batch = jnp.arange(proposal.tokens.shape[0])

    def here(node: Array, row: Array) -> tuple[Proposal, Array]:
        at = position + proposal.tree.depth[batch, node] + 1
        judged = jax.vmap(verifier.prepare)(key, at[:, None], row[:, None])
        return jax.vmap(siblings.node_with_children)(proposal, node), judged

    def visit(seen: _Visited, node: Array, moving: Array) -> tuple[_Visited, Array, Array]:
        row = jnp.where(moving[:, None], log_probs_at(node)[:, 0], seen.row)
        good = jnp.isfinite(jnp.max(row, axis=-1))
        local, judged = here(node, row)
        child = jax.vmap(siblings.children)(local)
        passed = (uniforms < jax.vmap(verifier.accept)(local, judged)) & child
        own = jnp.take_along_axis(row, proposal.tokens, axis=1)
        return _Visited(row, good, jnp.where(child, own, seen.logp)), passed, good

    def while_moving(seen: _Visited, node: Array, moving: Array) -> tuple[_Visited, Array, Array]:
        def stand(seen: _Visited, node: Array, moving: Array) -> tuple[_Visited, Array, Array]:
            return seen, jnp.zeros(proposal.tokens.shape, bool), seen.good

        return jax.lax.cond(jnp.any(moving), visit, stand, seen, node, moving)

    shape = jax.eval_shape(log_probs_at, jnp.zeros_like(position))
    nothing = jnp.zeros((batch.shape[0], shape.shape[-1]), shape.dtype)
    start = _Visited(nothing, jnp.ones(batch.shape, bool), jnp.zeros(proposal.tokens.shape, shape.dtype))
    walked, seen = descend(proposal.tree.parent, depth, while_moving, start)
    local, judged = here(walked.end, seen.row)
    weights = jax.vmap(verifier.residual)(local, judged, jnp.zeros_like(walked.end))
    token = _next(verifier, key, position, walked.end, weights).astype(proposal.tokens.dtype)
    return make_verdict(proposal, walked, seen.logp, token, seen.row[batch, token], seen.good)
