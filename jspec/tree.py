"""Trees of tokens: the traced `jspec.types.Tree`, and `TreeShape`, whose form is known before.

A tree is given by parents with ``parent[i] < i``. Chains are the special case whose
mask is ``None``; every function here takes both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.errors import JspecError
from jspec.types import Tree


def chain(batch: int, nodes: int, start: Int[Array, ""] | int = 0) -> Tree:
    """Node i hangs on node i - 1. ``start``: nodes of this chain that earlier passes of the round have run.

    >>> chain(1, 3).parent.tolist(), chain(1, 2, start=4).depth.tolist()
    ([[-1, 0, 1]], [[4, 5]])
    """
    index = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    return Tree(parent=index - 1, depth=index + start)


def from_parents(parent: Int[Array, "B N"]) -> Tree:
    """The tree of given parents, -1 for the root (and for unused nodes).

    >>> from_parents(jnp.array([[-1, 0, 0, 1]])).depth.tolist()
    [[0, 1, 1, 2]]
    """
    nodes = parent.shape[1]
    index = jnp.arange(nodes, dtype=jnp.int32)
    above = ((parent[:, :, None] == index) | (index[:, None] == index)).astype(jnp.float32)
    for _ in range(max(nodes - 1, 1).bit_length()):  # one step up becomes two, four, ...
        above = jnp.minimum(above @ above, 1.0)
    mask = above > 0
    return Tree(parent, mask.sum(-1, dtype=jnp.int32) - 1, mask)


def earlier_rows(tree: Tree) -> Int[Array, "B"] | int:
    """Scratch rows that earlier passes of this round have put before those of a tree.

    Of a chain the depth of its first node, traced; of a tree the rows that its mask has beyond
    its own, static.
    """
    return tree.depth[:, 0] if tree.mask is None else tree.mask.shape[2] - tree.mask.shape[1]


@dataclass(frozen=True)
class TreeShape:
    """A tree known before it is traced: nodes in the order of their depth, the root first.

    A path names a node by ranks: (1, 0) is the best child of the root's second best.

    >>> from_paths([(0,), (1,), (0, 0)])
    TreeShape(parent=(-1, 0, 0, 1), rank=(0, 0, 1, 0))
    >>> chain_shape(3).depth
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
        return np.asarray(self.sees.sum(axis=1) - 1)

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
            return chain(batch, len(self.parent))
        return broadcast(batch, *self.rows(np.arange(len(self.parent))))


def broadcast(batch: int, parent: np.ndarray, depth: np.ndarray, mask: np.ndarray) -> Tree:
    """The same nodes in every row of a batch."""
    parts = [jnp.asarray(part) for part in (parent, depth, mask)]
    return Tree(*(jnp.broadcast_to(part, (batch, *part.shape)) for part in parts))


def chain_shape(depth: int) -> TreeShape:
    """The best, after it the best, and so on."""
    return TreeShape(tuple(range(-1, depth)), (0,) * (depth + 1))


def from_paths(paths: Sequence[Sequence[int]]) -> TreeShape:
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
    return TreeShape(tuple(parent), tuple(rank))


def likeliest(size: int, depth: int, topk: int, decay: float = 0.5) -> TreeShape:
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
    return from_paths(chosen)


EAGLE_TREE = from_paths(
    [tuple(map(int, path)) for path in
     "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()]
)  # fmt: skip
"""The 25 nodes that EAGLE-1 verifies by default."""
