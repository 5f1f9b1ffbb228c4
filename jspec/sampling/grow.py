"""How drafts grow: a chain, a static tree, the best nodes first, or from per-depth guesses.

A tree grows level by level in one compiled program. A `Writer` runs rows of the draft; the
growth decides which, and which tokens follow. What comes out is a `Proposal`:

* `fixed`: a `Shape` known before, as a chain or a tree of ranks. Tokens are the draft's
  best, as point masses; or drawn, siblings without replacement, each with the law of what
  its earlier siblings left (Gumbel-top-k; Kool et al., arXiv 1903.06059).
* `best_first`: the nodes of greatest joint draft probability (EAGLE-2, arXiv 2406.16858).
* `marginals`: a shape filled from guesses for each depth that do not see each other
  (Medusa, arXiv 2401.10774).

Growth that looks at what was drafted keeps the target's law only for point masses: to
submit a drawn token because of its own probability would bias it. So `best_first` gives
no laws, and the shape of drawn trees is static.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec import tree
from jspec.errors import JspecError
from jspec.sampling import keys, policy
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


@dataclass(frozen=True)
class Shape:
    """A tree known before: nodes in the order of their depth, the root first.

    >>> shape([(0,), (1,), (0, 0)])
    Shape(parent=(-1, 0, 0, 1), rank=(0, 0, 1, 0))
    >>> chain(3).depth
    3
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]  # a node's token is the so-many-th best, or drawn, after its parent

    @functools.cached_property
    def level(self) -> tuple[int, ...]:
        """The depth of each node."""
        levels = [0]
        for parent in self.parent[1:]:
            levels.append(levels[parent] + 1)
        return tuple(levels)

    @property
    def depth(self) -> int:
        return max(self.level)

    @property
    def is_chain(self) -> bool:
        return self.parent == tuple(range(-1, len(self.parent) - 1)) and not any(self.rank)

    @functools.cached_property
    def sees(self) -> np.ndarray:
        """[N, N]: node i has node j on its path, itself included."""
        sees = np.eye(len(self.parent), dtype=bool)
        for node, parent in enumerate(self.parent[1:], start=1):
            sees[node] |= sees[parent]
        return sees

    def tree(self, batch: int) -> Tree:
        """So many rows of it; a chain as the chain that it is."""
        if self.is_chain:
            return tree.chain(batch, len(self.parent))
        rows = (jnp.array(self.parent), jnp.array(self.level), jnp.array(self.sees))
        return Tree(*(jnp.broadcast_to(row, (batch, *row.shape)) for row in rows))


def chain(depth: int) -> Shape:
    """The best, after it the best, and so on."""
    return Shape(tuple(range(-1, depth)), (0,) * (depth + 1))


def shape(paths: Sequence[Sequence[int]]) -> Shape:
    """The tree whose nodes are given by ranks from the root: (1, 0) is the best child of the second best.

    Raises `JspecError` for no path, one that comes twice, and one whose parent or better
    sibling is not there.
    """
    nodes: dict[tuple[int, ...], int] = {(): 0}
    parent, rank = [-1], [0]
    for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
        if path in nodes:
            raise JspecError(f"the tree has the path {path} twice, or an empty one")
        above, better = path[:-1], (*path[:-1], path[-1] - 1)
        if above not in nodes or (path[-1] and better not in nodes) or path[-1] < 0:
            raise JspecError(f"the tree has {path} without its parent {above} or its better sibling {better}")
        nodes[path] = len(parent)
        parent.append(nodes[above])
        rank.append(path[-1])
    if len(parent) == 1:
        raise JspecError("the tree has no node besides the root")
    return Shape(tuple(parent), tuple(rank))


def likeliest(size: int, depth: int, topk: int, decay: float = 0.5) -> Shape:
    """The ``size`` nodes most likely to be reached if rank r follows with a chance of (1 - decay)·decay^r.

    At most ``topk`` children a node and ``depth`` levels (Medusa chooses its trees so, by
    measured chances). Raises `JspecError` if there are not so many nodes.
    """
    chosen: list[tuple[int, ...]] = []
    pool: dict[tuple[int, ...], float] = {(0,): 1.0 - decay}
    while pool and len(chosen) < size:
        best = max(pool, key=lambda path: (pool[path], -len(path), tuple(-rank for rank in path)))
        chance = pool.pop(best)
        chosen.append(best)
        if len(best) < depth:
            pool[(*best, 0)] = chance * (1.0 - decay)
        if best[-1] + 1 < topk:
            pool[(*best[:-1], best[-1] + 1)] = chance * decay
    if len(chosen) < size:
        raise JspecError(
            f"a tree of depth {depth} and {topk} children a node has {len(chosen)} nodes, not {size}"
        )
    return shape(chosen)


EAGLE_TREE = shape(
    [tuple(map(int, path)) for path in
     "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()]
)  # fmt: skip
"""The 25 nodes that EAGLE-1 verifies by default."""


def fixed(
    shape: Shape, writer: Writer, start: Start, root: Int[Array, "B"], context: Context, drawn: bool
) -> Proposal:
    """Grow a static shape. ``drawn``: rows above temperature 0 draw their tokens; else all are the best."""
    batch, parents = root.shape[0], np.array(shape.parent)
    levels, ranks = np.array(shape.level), np.array(shape.rank)
    tokens = jnp.broadcast_to(root[:, None], (batch, len(parents)))
    logq = jnp.full((batch, len(parents), writer.vocab_size), -jnp.inf) if drawn else None
    row_of = np.full(len(parents), -1)  # of the draft: only nodes with children are run
    logits, carry, inner = start.logits[:, None], start.carry, np.array([0])
    for level in range(1, shape.depth + 1):
        nodes = np.flatnonzero(levels == level)
        at = np.searchsorted(inner, parents[nodes])
        width = int(ranks[nodes].max()) + 1
        if logq is None:
            found = writer.name(jax.lax.top_k(logits, width)[1])
        else:
            layout = _rows(shape, inner, batch)
            law = policy.apply(context.policy, context.history, tokens, layout, writer.spread(logits))
            found, laws = _draw(context, level, writer.spread(logits), law, width)
            logq = logq.at[:, nodes].set(laws[:, at, ranks[nodes]])
        tokens = tokens.at[:, nodes].set(found[:, at, ranks[nodes]].astype(tokens.dtype))
        inner = np.array([node for node in nodes if node in parents])
        if inner.size:
            row_of[inner] = row_of.max() + 1 + np.arange(len(inner))
            logits, carry = _run(shape, writer, carry, tokens, inner, row_of)
    return Proposal(tokens, shape.tree(batch), jnp.full((batch,), len(parents)), logq)


def _rows(shape: Shape, nodes: np.ndarray, batch: int) -> Tree | Any:
    """Some nodes of a shape, as rows that look at all of it."""
    rows = (np.array(shape.parent)[nodes], np.array(shape.level)[nodes], shape.sees[nodes])
    return Tree(*(jnp.broadcast_to(jnp.array(row), (batch, *row.shape)) for row in rows))


def _run(
    shape: Shape, writer: Writer, carry: Any, tokens: Array, nodes: np.ndarray, row_of: np.ndarray
) -> tuple[Array, Any]:
    """Run the draft for a level's inner nodes."""
    order = np.argsort(row_of)
    run = order[row_of[order] >= 0]  # all nodes run so far, in the order of their rows
    above = row_of[np.array(shape.parent)[nodes]]
    rows = (above, np.array(shape.level)[nodes] - 1, shape.sees[np.ix_(nodes, run)])
    layout = Tree(*(jnp.broadcast_to(jnp.array(row), (len(tokens), *row.shape)) for row in rows))
    return writer.run(carry, tokens[:, nodes], layout.parent, layout)


def _draw(
    context: Context, level: int, logits: Float[Array, "B T V"], law: Float[Array, "B T V"], count: int
) -> tuple[Int[Array, "B T count"], Float[Array, "B T count V"]]:
    """Tokens drawn without replacement, in their order, and the law that each was drawn from.

    All nodes of a level share the noise: at most one of them is on the path that the
    target takes. A row at temperature 0 takes the best tokens, as point masses.
    """
    each = jax.vmap(jax.random.fold_in)(keys.wrap(context.key), context.offset + level)
    noise = jax.vmap(keys.gumbel, (0, None))(each, law.shape[-1])
    warm = (context.policy.temperature > 0)[:, None, None]
    tokens = jax.lax.top_k(jnp.where(warm, law + noise[:, None], logits), count)[1]
    laws, left = [], jnp.where(warm, law, -jnp.inf)
    batch, rows = jnp.arange(law.shape[0])[:, None], jnp.arange(law.shape[1])
    for rank in range(count):
        laws.append(left)
        left = left.at[batch, rows, tokens[..., rank]].set(-jnp.inf)
        left = left - jax.nn.logsumexp(left, axis=-1, keepdims=True)
    return tokens, jnp.stack(laws, axis=2)


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
    score, tokens = jax.lax.top_k(jax.nn.log_softmax(start.logits), topk)
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
        more, tokens = jax.lax.top_k(jax.nn.log_softmax(logits), topk)
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


def marginals(shape: Shape, logits: Float[Array, "B M W"], writer: Writer, root: Int[Array, "B"]) -> Proposal:
    """Fill a shape from guesses for each depth: a node of rank r is the r-th best of its depth."""
    batch, levels, ranks = root.shape[0], np.array(shape.level), np.array(shape.rank)
    best = writer.name(jax.lax.top_k(logits, int(ranks.max()) + 1)[1])
    drafts = best[:, levels[1:] - 1, ranks[1:]].astype(root.dtype)
    tokens = jnp.concatenate([root[:, None], drafts], axis=1)
    return Proposal(tokens, shape.tree(batch), jnp.full((batch,), len(ranks)))
