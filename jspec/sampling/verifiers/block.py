"""Block verification: keep the longest prefix of a chain whose joint ratio passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.sampling.verifiers.token import accept as token_accept
from jspec.sampling.verifiers.token import excess, log_ratio, remainder
from jspec.types import Proposal, Verifier


def log_reach(proposal: Proposal, logp: Float[Array, "N V"]) -> Float[Array, "N"]:
    """log P_i: P_0 = 1, P_i = min(1, P_{i-1} · p(x_i)/q(x_i)); constant after the last draft."""
    return reach_of(log_ratio(proposal, logp), proposal.count)


def reach_of(ratio: Float[Array, "N"], count: Int[Array, ""]) -> Float[Array, "N"]:
    """`log_reach` from log p/q of each node's own token."""
    node = jnp.arange(ratio.shape[0])
    ratio = jnp.where((node > 0) & (node < count), ratio, 0.0)

    def reach(before: Array, ratio: Array) -> tuple[Array, Array]:
        now = jnp.minimum(before + ratio, 0.0)
        return now, now

    return jax.lax.scan(reach, jnp.zeros((), ratio.dtype), ratio, unroll=True)[1]


def _own_chance(
    total: Float[Array, "N"], reach: Float[Array, "N"], count: Int[Array, ""]
) -> Float[Array, "N"]:
    """h_i = S/(S + 1 - P_i) with S = Σ max(P_i p - q, 0), h_γ = P_γ, and 0 beyond it."""
    node = jnp.arange(total.shape[0])
    below = total - jnp.expm1(reach)
    # Rounding must not lift h above 1, where 1 - h has no logarithm.
    chance = jnp.where(below > 0, jnp.minimum(total / jnp.where(below > 0, below, 1.0), 1.0), 1.0)
    chance = jnp.where(node == count - 1, jnp.exp(reach), chance)
    return jnp.where(node < count, chance, 0.0)


def _accept(proposal: Proposal, logp: Float[Array, "N V"]) -> Float[Array, "N"]:
    if proposal.logq is None:  # then G_i = P_i: it is the token verifier
        return token_accept(proposal, logp)
    reach = log_reach(proposal, logp)
    total = jax.vmap(lambda i: excess(proposal, logp, i, reach[i]).sum())(jnp.arange(logp.shape[0]))
    return chances(proposal, total, reach)


def chances(proposal: Proposal, total: Float[Array, "N"], reach: Float[Array, "N"]) -> Float[Array, "N"]:
    """The chances from each node's P (``reach``, a logarithm) and Σ max(P p - q, 0)."""
    # G_i = h_i + (1 - h_i) G_{i+1}, that is 1 - G_i = Π_{j ≥ i} (1 - h_j)
    misses = jnp.log1p(-_own_chance(total, reach, proposal.count))
    kept = (-jnp.expm1(jax.lax.cumsum(misses, reverse=True))).at[0].set(1.0)
    before = kept[jnp.clip(proposal.tree.parent, 0)]
    return jnp.where(before > 0, kept / jnp.where(before > 0, before, 1.0), 0.0)


def _residual(proposal: Proposal, logp: Float[Array, "N V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    return remainder(proposal, logp, node, log_reach(proposal, logp)[node])


block = Verifier("block", _accept, _residual, growths=("chain",))
"""Block verification: the last of all drafts x_1..x_i whose uniform number u_i < h_i.

Never fewer tokens than `token` on average. The paper throws independent uniform numbers and takes
the last that passes; here the walk asks at each node for the chance that some number from
here on passes, G_i, given that one from its parent on does: accept_i = G_i / G_{i-1}.
(Sun et al.: Block verification accelerates speculative decoding, arXiv 2403.10444)."""
