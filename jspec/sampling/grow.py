"""How drafts grow: a chain, a static tree, the best nodes first, or from per-depth guesses.

A tree grows level by level in one compiled program. A `Writer` runs rows of the draft; the
growth decides which, and which tokens follow. What comes out is a `Proposal`:

* `fixed`: a `Shape` known before, as a chain or a tree of ranks. Tokens are the draft's
  best, as point masses; or drawn, siblings without replacement, each with the distribution of what
  its earlier siblings left (Gumbel-top-k; Kool et al., arXiv 1903.06059).
* `best_first`: the nodes of greatest joint draft probability (EAGLE-2, arXiv 2406.16858).
* `marginals`: a shape filled from guesses for each depth that do not see each other
  (Medusa, arXiv 2401.10774).

Growth that looks at what was drafted keeps the target's distribution only for point masses: to
submit a drawn token because of its own probability would bias it. So `best_first` gives
no distributions, and the shape of drawn trees is static.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec import tree
from jspec.sampling import distribution, keys
from jspec.tree import TreeShape, broadcast
from jspec.types import Context, Proposal, Tree

Run = Callable[[Any, Array, Array, Tree], tuple[Array, Any]]


class Start(NamedTuple):
    """Where a growth begins: the draft's logits after the root, and its rows' state."""

    logits: Float[Array, "B W"]
    carry: Any


@dataclass(frozen=True, eq=False)
class Writer:
    """A draft as a growth sees it.

    * ``run(carry, tokens_BT, above_BT, layout) -> (logits_BTW, carry)`` runs rows for drafted
      tokens (ids of the target). ``above``: each row's parent among the rows run since the
      root, -1 for the root; ``layout``: their depths, 0 right below the root, and what they
      see of all R rows so far, themselves included.
    * ``ids``: Int[W], the target's id of each draft id; None: the same.
    * ``vocab_size``: the target's V.
    """

    run: Run
    ids: Int[Array, "W"] | None
    vocab_size: int

    def name(self, tokens: Array) -> Array:
        """Draft ids as ids of the target."""
        return tokens if self.ids is None else self.ids[tokens]

    def spread(self, logits: Float[Array, "*rows W"]) -> Float[Array, "*rows V"]:
        """Draft logits over the target's vocabulary, -inf where the draft has no id."""
        if self.ids is not None:
            empty = jnp.full((*logits.shape[:-1], self.vocab_size), -jnp.inf, logits.dtype)
            return empty.at[..., self.ids].set(logits)
        logits = logits[..., : self.vocab_size]
        missing = [(0, 0)] * (logits.ndim - 1) + [(0, self.vocab_size - logits.shape[-1])]
        return jnp.pad(logits, missing, constant_values=-jnp.inf)


def fixed(
    shape: TreeShape, writer: Writer, start: Start, root: Int[Array, "B"], context: Context, drawn: bool
) -> Proposal:
    """Grow a static shape. ``drawn``: rows above temperature 0 draw their tokens; else all are the best."""
    batch, count = root.shape[0], len(shape.parent)
    tokens = jnp.broadcast_to(root[:, None], (batch, count))
    logps = [jnp.full((batch, 1, writer.vocab_size), -jnp.inf)]  # of each node; the root's is not looked at
    logits, carry = start.logits[:, None], start.carry
    for level in range(1, shape.depth + 1):
        nodes, inner = np.flatnonzero(shape.levels == level), shape.inner(level - 1)
        # Each node's parent among those that have logits, and its rank after it.
        at, rank = np.searchsorted(inner, shape.parents[nodes]), shape.ranks[nodes]
        if not drawn:
            found = writer.name(_top(logits, shape.widest(level))[1])
        else:
            known, layout = writer.spread(logits), broadcast(batch, *shape.rows(inner))
            logp = distribution.log_probs(context.policy, context.history, tokens, layout, known)
            found = _draw(context, level, known, logp, shape.widest(level))
            logps += _conditionals(context, at, rank, logp, found)
        tokens = tokens.at[:, nodes].set(found[:, at, rank].astype(tokens.dtype))
        if level < shape.depth:
            logits, carry = _run(shape, level, writer, carry, tokens)
    logq = jnp.concatenate(logps, axis=1) if drawn else None
    return Proposal(tokens, shape.tree(batch), jnp.full((batch,), count), logq)


def _run(shape: TreeShape, level: int, writer: Writer, carry: Any, tokens: Array) -> tuple[Array, Any]:
    """Run the draft for the nodes of a level that have children: its newest rows."""
    nodes = shape.inner(level)
    run = np.concatenate([shape.inner(above) for above in range(1, level + 1)])
    parent, depth, sees = shape.rows(nodes, run)
    above = np.searchsorted(run, parent) if level > 1 else np.full_like(parent, -1)
    layout = broadcast(len(tokens), above, depth - 1, sees)
    return writer.run(carry, tokens[:, nodes], layout.parent, layout)


def _draw(
    context: Context, level: int, logits: Float[Array, "B T V"], logp: Float[Array, "B T V"], count: int
) -> Int[Array, "B T count"]:
    """Tokens drawn without replacement, in their order (Gumbel-top-k).

    All nodes of a level share the noise: at most one of them is on the path that the
    target takes. A row at temperature 0 takes the best tokens.
    """
    each = jax.vmap(jax.random.fold_in)(keys.wrap(context.key), context.offset + level)
    noise = jax.vmap(keys.gumbel, (0, None))(each, logp.shape[-1])
    sampled = (context.policy.temperature > 0)[:, None, None]
    return _top(jnp.where(sampled, logp + noise[:, None], logits), count)[1]


def _conditionals(
    context: Context, at: np.ndarray, rank: np.ndarray, logp: Float[Array, "B T V"], found: Array
) -> list[Float[Array, "B 1 V"]]:
    """The distribution that each node of a level was drawn from: its row without its earlier siblings.

    Row by row, for XLA on CPU gathers and scatters element by element. A row at
    temperature 0 has -inf everywhere: its tokens are point masses.
    """
    sampled = (context.policy.temperature > 0)[:, None, None]
    token = jnp.arange(logp.shape[-1])
    left: dict[tuple, Array] = {}
    for row, r in zip(at, rank, strict=True):  # siblings stand in the order of their ranks
        own = logp[:, row : row + 1]
        if r:
            own = jnp.where(token == found[:, row, r - 1][:, None, None], -jnp.inf, left[row, r - 1])
            own = own - jax.nn.logsumexp(own, axis=-1, keepdims=True)
        left[row, r] = own
    return [jnp.where(sampled, own, -jnp.inf) for own in left.values()]


def _top(
    values: Float[Array, "*rows W"], count: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The greatest values and their places, as one operation.

    Without the barrier a slice of the result may be merged into it, and XLA on CPU then
    sorts all W values instead.
    """
    return jax.lax.optimization_barrier(tuple(jax.lax.top_k(values, count)))


class _Pool(NamedTuple):
    """Candidates in the order of their creation."""

    tokens: Array  # draft ids
    score: Array  # log of the joint draft probability
    parent: Array  # the candidate above; -1: the root


def best_first(
    size: int, depth: int, topk: int, writer: Writer, start: Start, root: Int[Array, "B"]
) -> Proposal:
    """EAGLE-2's tree: ``size`` nodes of the greatest joint draft probability, of ``depth`` levels.

    The best ``topk`` nodes of each level are run and propose ``topk`` children each. Scores
    are of the draft alone, at temperature 1. N = size + 1.
    """
    batch = root.shape[0]
    score, tokens = _top(jax.nn.log_softmax(start.logits), topk)
    pool = _Pool(tokens, score, jnp.full((batch, topk), -1))
    frontier = jnp.broadcast_to(jnp.arange(topk), (batch, topk))  # candidates
    above, sees = jnp.full((batch, topk), -1), jnp.zeros((batch, topk, 0), bool)
    carry = start.carry
    for level in range(depth - 1):
        own = jnp.broadcast_to(jnp.eye(topk, dtype=bool), (batch, topk, topk))
        mask = jnp.concatenate([sees, own], axis=-1)
        layout = Tree(above, jnp.full((batch, topk), level), mask)
        picked = _Pool(*(jnp.take_along_axis(part, frontier, axis=1) for part in pool))
        logits, carry = writer.run(carry, writer.name(picked.tokens), above, layout)
        more, tokens = _top(jax.nn.log_softmax(logits), topk)
        score = (picked.score[:, :, None] + more).reshape(batch, -1)
        slot = jnp.broadcast_to(jnp.arange(topk).repeat(topk), (batch, topk * topk))
        first = pool.tokens.shape[1]
        new = _Pool(tokens.reshape(batch, -1), score, jnp.take_along_axis(frontier, slot, axis=1))
        pool = _Pool(*(jnp.concatenate(parts, axis=1) for parts in zip(pool, new, strict=True)))
        best = jax.lax.top_k(score, topk)[1]
        parent = jnp.take_along_axis(slot, best, axis=1)  # its slot in the frontier
        frontier, above = first + best, level * topk + parent
        sees = jnp.take_along_axis(mask, parent[:, :, None], axis=1)
    return _rank(size, pool, writer, root)


def _rank(size: int, pool: _Pool, writer: Writer, root: Int[Array, "B"]) -> Proposal:
    """Keep the best candidates; no child scores above its parent, so they hang together."""
    batch = root.shape[0]
    kept = jnp.sort(jax.lax.top_k(pool.score, size)[1], axis=1)
    picked = _Pool(*(jnp.take_along_axis(part, kept, axis=1) for part in pool))
    place = jnp.sum(kept[:, None, :] < picked.parent[:, :, None], axis=-1)  # of the parent among the kept
    parent = jnp.where(picked.parent < 0, 0, place + 1)
    tokens = jnp.concatenate([root[:, None], writer.name(picked.tokens).astype(root.dtype)], axis=1)
    layout = tree.from_parents(jnp.pad(parent, ((0, 0), (1, 0)), constant_values=-1))
    return Proposal(tokens, layout, jnp.full((batch,), size + 1))


def marginals(
    shape: TreeShape, logits: Float[Array, "B M W"], writer: Writer, root: Int[Array, "B"]
) -> Proposal:
    """Fill a shape from guesses for each depth: a node of rank r is the r-th best of its depth."""
    batch, width = root.shape[0], max(map(shape.widest, range(1, shape.depth + 1)))
    best = writer.name(_top(logits, width)[1])
    drafts = best[:, shape.levels[1:] - 1, shape.ranks[1:]].astype(root.dtype)
    tokens = jnp.concatenate([root[:, None], drafts], axis=1)
    return Proposal(tokens, shape.tree(batch), jnp.full((batch,), len(shape.parent)))
