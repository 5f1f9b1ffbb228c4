"""Trees of tokens: chains, ancestor masks, and the walk from the root.

A tree is given by parents with ``parent[i] < i``. Chains are the special case whose
mask is ``None``; every function here takes both.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

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


def walk(tree: Tree, passed: Bool[Array, "B N"], depth: int) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
    """Walk down from the root, at each node to its first child that passed.

    Returns the path (root first, 0 after its end, P = depth + 1) and the number of
    nodes on it below the root.
    """
    batch, nodes = passed.shape
    if tree.mask is None:
        accepted = jnp.cumprod(passed[:, 1:], axis=1).sum(axis=1)
        path = jnp.broadcast_to(jnp.arange(depth + 1), (batch, depth + 1))
        return jnp.where(path <= accepted[:, None], path, 0), accepted
    siblings = tree.parent[:, :, None] == tree.parent[:, None, :]
    earlier = jnp.arange(nodes)[:, None] > jnp.arange(nodes)[None, :]
    first = passed & ~jnp.any(siblings & earlier & passed[:, None, :], axis=-1)
    first = first.at[:, 0].set(True)  # the root is known
    reached = ~jnp.any(tree.mask & ~first[:, None, :], axis=-1) & tree.mask[:, :, 0]
    at_depth = reached[:, None, :] & (tree.depth[:, None, :] == jnp.arange(depth + 1)[:, None])
    return jnp.argmax(at_depth, axis=-1), jnp.any(at_depth, axis=-1).sum(axis=-1) - 1
