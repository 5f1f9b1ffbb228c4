"""Several drafts at one node: recursive rejection, one sibling after the other.

At a node with law p start with r = p. For each child x in the order of the nodes, drawn
from q given its earlier siblings: keep x with probability min(1, r(x)/q(x)), else go on
with r = norm(max(r - q, 0)). If all are refused the next token is drawn from r.

q may be the same law for all siblings (draws with replacement: SpecInfer, arXiv
2305.09781), the law of what is left (without: Sequoia, arXiv 2402.12374; RSD, arXiv
2402.14160), or a point mass (any choice that does not look at the verifier's coins, such
as the top-k of EAGLE-2, arXiv 2406.16858). Siblings may be of different kinds.

Everything here is of one row and one **star**: a node and its children. The functions of
a rule see a tree as the star at which the walk stands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.types import Proposal, Tree


def star(proposal: Proposal, node: Int[Array, ""]) -> Proposal:
    """A node and its children: node 0 stands for it, its children keep their places.

    >>> tree = Tree(jnp.array([-1, 0, 0, 1]), jnp.array([0, 1, 1, 2]), jnp.eye(4, dtype=bool))
    >>> star(Proposal(jnp.arange(4), tree, jnp.array(4)), jnp.array(0)).tree.parent.tolist()
    [-1, 0, 0, -1]
    """
    real = jnp.arange(proposal.tokens.shape[0]) < proposal.count
    child = (proposal.tree.parent == node) & real
    return proposal._replace(tree=Tree(jnp.where(child, 0, -1), child.astype(jnp.int32), proposal.tree.mask))


def children(star: Proposal) -> Bool[Array, "N"]:
    """Which nodes of a star are children."""
    return star.tree.parent == 0


def has_law(proposal: Proposal) -> Bool[Array, "N"]:
    """Whether a node's q is a law (no NaN, no +inf) by which its token can occur.

    Any other node is judged as a point mass, which keeps p whatever the drafter did.
    """
    if proposal.logq is None:
        return jnp.zeros(proposal.tokens.shape, bool)
    own = jnp.take_along_axis(proposal.logq, proposal.tokens[:, None], axis=1)[:, 0]
    return jnp.isfinite(worst(proposal.logq)) & (own > -jnp.inf)


def worst(rows: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """The greatest entry, finite in a law; NaN counts as +inf, for XLA's maximum on CPU overlooks it."""
    return jnp.max(jnp.where(jnp.isnan(rows), jnp.inf, rows), axis=-1)


def chances(star: Proposal, law: Float[Array, "V"]) -> Float[Array, "N"]:
    """P(child kept | all earlier siblings refused); 0 for nodes that are no children."""
    return _points(star, law)[0] if star.logq is None else _drawn(star, star.logq, law)[0]


def remainder(star: Proposal, law: Float[Array, "V"]) -> Float[Array, "V"]:
    """Log-weights of the next token once all children are refused; p itself where there are none."""
    return _points(star, law)[1] if star.logq is None else _drawn(star, star.logq, law)[1]


def point_chances(
    tokens: Int[Array, "N"], parent: Int[Array, "N"], mass: Float[Array, "N"]
) -> Float[Array, "N"]:
    """P(node kept | all earlier siblings refused) where every node is a point mass.

    ``mass``: the target's probability of each node's token at its parent; ``parent`` < 0: no node.
    r is p without the tokens refused so far, so nothing of width V is summed.
    """
    index = jnp.arange(tokens.shape[0])
    earlier = (parent[None, :] == parent[:, None]) & (parent >= 0) & (index[None, :] < index[:, None])
    again = jnp.any(earlier & (tokens[None, :] == tokens[:, None]), axis=1)
    mass = jnp.where((parent >= 0) & ~again, mass, 0.0)
    left = 1.0 - jnp.sum(jnp.where(earlier, mass[None, :], 0.0), axis=1)
    return jnp.where(mass > 0, mass / jnp.maximum(left, mass), 0.0)


def _points(star: Proposal, law: Float[Array, "V"]) -> tuple[Float[Array, "N"], Float[Array, "V"]]:
    chance = point_chances(star.tokens, star.tree.parent, jnp.exp(law[star.tokens]))
    refused = law.at[jnp.where(children(star), star.tokens, law.shape[0])].set(-jnp.inf, mode="drop")
    return chance, jnp.where(jnp.max(refused) > -jnp.inf, refused, law)


def _drawn(
    star: Proposal, logq: Array, law: Float[Array, "V"]
) -> tuple[Float[Array, "N"], Float[Array, "V"]]:
    """Drafts with laws: one pass over V for each child, and none for other nodes."""
    child, index, tokens = children(star), jnp.arange(star.tokens.shape[0]), star.tokens

    def following(node):
        """The next child after a node; N if there is none."""
        return jnp.min(jnp.where(child & (index > node), index, index.shape[0]))

    def judge(carry):
        node, chance, left = carry
        row = logq[node]  # looked at here, for `has_law` would read those of all nodes
        q = jax.nn.one_hot(tokens[node], law.shape[0], dtype=law.dtype)
        drawn = jnp.isfinite(worst(row)) & (row[tokens[node]] > -jnp.inf)
        q = jnp.where(drawn, jnp.exp(row), q)
        own = left[tokens[node]] / q[tokens[node]]
        rest = jnp.maximum(left - q, 0.0)
        total = jnp.sum(rest)
        left = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), left)
        return following(node), chance.at[node].set(jnp.minimum(own, 1.0)), left

    start = following(0), jnp.zeros(tokens.shape, law.dtype), jnp.exp(law)
    _, chance, left = jax.lax.while_loop(lambda carry: carry[0] < index.shape[0], judge, start)
    return chance, jnp.log(left)
