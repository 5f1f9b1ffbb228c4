"""Trees of tokens: chains, and what follows from parents.

A tree is given by parents with ``parent[i] < i``. Chains are the special case whose
mask is ``None``; every function here takes both.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.types import Tree


def chain(batch: int, nodes: int) -> Tree:
    """Node i hangs on node i - 1.

    >>> chain(1, 3).parent.tolist()
    [[-1, 0, 1]]
    """
    index = jnp.broadcast_to(jnp.arange(nodes), (batch, nodes))
    return Tree(parent=index - 1, depth=index)


def from_parents(parent: Int[Array, "B N"]) -> Tree:
    """The tree of given parents, -1 for the root (and for unused nodes).

    >>> from_parents(jnp.array([[-1, 0, 0, 1]])).depth.tolist()
    [[0, 1, 1, 2]]
    """
    nodes = parent.shape[1]
    index = jnp.arange(nodes)
    above = ((parent[:, :, None] == index) | (index[:, None] == index)).astype(jnp.float32)
    for _ in range(max(nodes - 1, 1).bit_length()):  # one step up becomes two, four, ...
        above = jnp.minimum(above @ above, 1.0)
    mask = above > 0
    return Tree(parent, mask.sum(-1) - 1, mask)


def earlier_rows(tree: Tree) -> int:
    """Scratch rows that earlier passes of this round have put before those of a tree."""
    return 0 if tree.mask is None else tree.mask.shape[2] - tree.mask.shape[1]
