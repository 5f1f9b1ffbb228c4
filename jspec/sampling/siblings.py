"""Several drafts at one node: recursive rejection, one sibling after the other.

At a node with distribution p start with r = p. For each child x in the order of the nodes, drawn
from q given its earlier siblings: keep x with probability min(1, r(x)/q(x)), else go on
with r = norm(max(r - q, 0)). If all are refused the next token is drawn from r.

q may be the same distribution for all siblings (draws with replacement: SpecInfer, arXiv
2305.09781), the distribution of what is left (without: Sequoia, arXiv 2402.12374; RSD, arXiv
2402.14160), or a point mass (any choice that does not look at the verifier's uniform numbers, such
as the top-k of EAGLE-2, arXiv 2406.16858). Siblings may be of different kinds.

Everything here is of one row. The functions of a verifier see a tree as `node_with_children`: the
node at which the walk stands, and its children.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.types import Proposal, Tree


def node_with_children(proposal: Proposal, node: Int[Array, ""]) -> Proposal:
    """A node and its children: node 0 stands for it, its children keep their places.

    >>> tree = Tree(jnp.array([-1, 0, 0, 1]), jnp.array([0, 1, 1, 2]), jnp.eye(4, dtype=bool))
    >>> node_with_children(Proposal(jnp.arange(4), tree, jnp.array(4)), jnp.array(0)).tree.parent.tolist()
    [-1, 0, 0, -1]
    """
    real = jnp.arange(proposal.tokens.shape[0]) < proposal.count
    child = (proposal.tree.parent == node) & real
    return proposal._replace(tree=Tree(jnp.where(child, 0, -1), child.astype(jnp.int32), proposal.tree.mask))


def children(here: Proposal) -> Bool[Array, "N"]:
    """Which nodes are children, of what `node_with_children` gives."""
    return here.tree.parent == 0


def without_foreign_ids(proposal: Proposal, vocab: int) -> Proposal:
    """The proposal without nodes whose id is no token, and without what hangs on them; of one row or of B.

    Drafters copy what they find, placeholders of a prompt too. Such a node is not refused but
    absent: nothing of p is taken away for it.

    >>> from jspec import tree
    >>> without_foreign_ids(Proposal(jnp.array([[0, 2, 9, 1]]), tree.chain(1, 4), jnp.array([4])), 5).count
    Array([2], dtype=int32)
    """
    known = (proposal.tokens >= 0) & (proposal.tokens < vocab)
    known |= jnp.arange(known.shape[-1]) == 0  # the root is not judged
    tokens = jnp.clip(proposal.tokens, 0, vocab - 1)
    if proposal.tree.mask is None:
        leading = jnp.sum(jnp.cumprod(known, axis=-1), axis=-1)
        return proposal._replace(tokens=tokens, count=jnp.minimum(proposal.count, leading))
    layout = proposal.tree._replace(parent=jnp.where(known, proposal.tree.parent, -1))
    return proposal._replace(tokens=tokens, tree=layout)


def has_distribution(proposal: Proposal) -> Bool[Array, "N"]:
    """Whether a node's q is a distribution (no NaN, no +inf) by which its token can occur.

    Any other node is judged as a point mass, which keeps p whatever the drafter did.
    """
    if proposal.logq is None:
        return jnp.zeros(proposal.tokens.shape, bool)
    own = jnp.take_along_axis(proposal.logq, proposal.tokens[:, None], axis=1)[:, 0]
    return jnp.isfinite(greatest(proposal.logq)) & (own > -jnp.inf)


def greatest(rows: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """The greatest entry, finite in a distribution; NaN, which XLA's maximum on CPU overlooks, is +inf."""
    return jnp.max(jnp.where(jnp.isnan(rows), jnp.inf, rows), axis=-1)


def chances(here: Proposal, logp: Float[Array, "V"]) -> Float[Array, "N"]:
    """P(child kept | all earlier siblings refused); 0 for nodes that are no children."""
    return _points(here, logp)[0] if here.logq is None else _drawn(here, here.logq, logp)[0]


def remainder(here: Proposal, logp: Float[Array, "V"]) -> Float[Array, "V"]:
    """Log-weights of the next token once all children are refused; p itself where there are none."""
    return _points(here, logp)[1] if here.logq is None else _drawn(here, here.logq, logp)[1]


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


def _points(here: Proposal, logp: Float[Array, "V"]) -> tuple[Float[Array, "N"], Float[Array, "V"]]:
    chance = point_chances(here.tokens, here.tree.parent, jnp.exp(logp[here.tokens]))
    refused = logp.at[jnp.where(children(here), here.tokens, logp.shape[0])].set(-jnp.inf, mode="drop")
    return chance, jnp.where(jnp.max(refused) > -jnp.inf, refused, logp)


def _drawn(
    here: Proposal, logq: Array, logp: Float[Array, "V"]
) -> tuple[Float[Array, "N"], Float[Array, "V"]]:
    """Drafts with distributions: one pass over V for each child, and none for other nodes."""
    child, index, tokens = children(here), jnp.arange(here.tokens.shape[0]), here.tokens

    def following(node):
        """The next child after a node; N if there is none."""
        return jnp.min(jnp.where(child & (index > node), index, index.shape[0]))

    def judge(carry):
        node, chance, left = carry
        row = logq[node]  # looked at here, for `has_distribution` would read those of all nodes
        q = jax.nn.one_hot(tokens[node], logp.shape[0], dtype=logp.dtype)
        drawn = jnp.isfinite(greatest(row)) & (row[tokens[node]] > -jnp.inf)
        q = jnp.where(drawn, jnp.exp(row), q)
        own = left[tokens[node]] / q[tokens[node]]
        rest = jnp.maximum(left - q, 0.0)
        total = jnp.sum(rest)
        left = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), left)
        return following(node), chance.at[node].set(jnp.minimum(own, 1.0)), left

    start = following(0), jnp.zeros(tokens.shape, logp.dtype), jnp.exp(logp)
    _, chance, left = jax.lax.while_loop(lambda carry: carry[0] < index.shape[0], judge, start)
    return chance, jnp.log(left)
