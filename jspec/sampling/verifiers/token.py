"""Token by token: accept x with probability min(1, p(x)/q(x)), else draw from max(p - q, 0)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.sampling import siblings
from jspec.types import Proposal, Verifier


def chain_chances(log_ratio: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """min(1, p/q) of each node's own token, from log p/q."""
    return jnp.exp(jnp.minimum(log_ratio, 0.0))


def log_ratio(proposal: Proposal, logp: Float[Array, "N V"]) -> Float[Array, "N"]:
    """log p/q of each node's own token in a chain."""
    p = logp[jnp.clip(proposal.tree.parent, 0), proposal.tokens]
    if proposal.logq is None:
        return p
    own = jnp.take_along_axis(proposal.logq, proposal.tokens[:, None], axis=1)[:, 0]
    return p - jnp.where(siblings.has_distribution(proposal), own, 0.0)


def excess(
    proposal: Proposal, logp: Float[Array, "N V"], node: Int[Array, ""], log_reach: Float[Array, ""]
) -> Float[Array, "V"]:
    """max(reach · p - q, 0), where q is what the node's child in a chain was drawn from."""
    child = jnp.minimum(node + 1, logp.shape[0] - 1)
    q = jax.nn.one_hot(proposal.tokens[child], logp.shape[1], dtype=logp.dtype)
    if proposal.logq is not None:
        q = jnp.where(siblings.has_distribution(proposal)[child], jnp.exp(proposal.logq[child]), q)
    return jnp.maximum(jnp.exp(logp[node] + log_reach) - q, 0.0)


def remainder(
    proposal: Proposal, logp: Float[Array, "N V"], node: Int[Array, ""], log_reach: Float[Array, ""]
) -> Float[Array, "V"]:
    """The excess as log-weights; p itself after the last draft, and where rounding left no excess."""
    rest = excess(proposal, logp, node, log_reach)
    refused = (node + 1 < proposal.count) & (jnp.max(rest) > 0)
    return jnp.where(refused, jnp.log(rest), logp[node])


def accept(proposal: Proposal, logp: Float[Array, "M V"]) -> Float[Array, "N"]:
    """Of a chain whole, of a tree the children of one node."""
    if proposal.tree.mask is not None:
        return siblings.chances(proposal, logp[0])
    return chain_chances(log_ratio(proposal, logp))


def _residual(proposal: Proposal, logp: Float[Array, "M V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    if proposal.tree.mask is not None:
        return siblings.remainder(proposal, logp[0])
    return remainder(proposal, logp, node, jnp.zeros((), logp.dtype))


token = Verifier("token", accept, _residual)
"""Accept x with probability min(1, p(x)/q(x)), else draw from max(p - q, 0).

(Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding,
arXiv 2211.17192; Chen et al., arXiv 2302.01318). Siblings in a tree are asked one after
the other, each with what the earlier ones left of p: `jspec.sampling.siblings`."""
