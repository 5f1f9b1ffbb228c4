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
    batch, nodes = parent.shape
    rows = jnp.arange(batch)
    masks: list[Array] = []
    for node in range(nodes):
        own = jnp.broadcast_to(jnp.arange(nodes) == node, (batch, nodes))
        if masks:
            above = jnp.stack(masks, axis=1)[rows, jnp.clip(parent[:, node], 0)]
            own = own | (above & (parent[:, node] >= 0)[:, None])
        masks.append(own)
    mask = jnp.stack(masks, axis=1)
    return Tree(parent, mask.sum(-1) - 1, mask)


def earlier_rows(tree: Tree) -> int:
    """Scratch rows that earlier passes of this round have put before those of a tree."""
    return 0 if tree.mask is None else tree.mask.shape[2] - tree.mask.shape[1]
