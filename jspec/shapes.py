"""Shapes of trees known before: as ranks from the root, all on the host.

A path names a node by ranks: (1, 0) is the best child of the root's second best.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.errors import JspecError
from jspec.types import Tree


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
    def parents(self) -> np.ndarray:
        return np.array(self.parent)

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        return np.array(self.rank)

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """The depth of each node."""
        return self.sees.sum(axis=1) - 1

    @property
    def depth(self) -> int:
        return int(self.levels.max())

    def widest(self, level: int) -> int:
        """How many ranks the nodes of a level use."""
        return int(self.ranks[self.levels == level].max()) + 1

    def inner(self, level: int) -> np.ndarray:
        """The nodes of a level that have children."""
        return np.flatnonzero((self.levels == level) & np.isin(np.arange(len(self.parent)), self.parents))

    def rows(self, nodes: np.ndarray, columns: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Parents, depths and what they see (of the columns, default: all) of some nodes."""
        seen = self.sees[nodes] if columns is None else self.sees[np.ix_(nodes, columns)]
        return self.parents[nodes], self.levels[nodes], seen

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
        return spread(batch, *self.rows(np.arange(len(self.parent))))


def spread(batch: int, parent: np.ndarray, depth: np.ndarray, mask: np.ndarray) -> Tree:
    """The same nodes in every row of a batch."""
    parts = [jnp.asarray(part) for part in (parent, depth, mask)]
    return Tree(*(jnp.broadcast_to(part, (batch, *part.shape)) for part in parts))


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
