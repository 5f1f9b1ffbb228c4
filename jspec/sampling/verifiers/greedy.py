"""Temperature 0: a draft is kept iff it is the target's argmax (lowest id in a tie)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.sampling import keys
from jspec.types import Proposal, Verifier


def is_argmax(proposal: Proposal, logp: Float[Array, "M V"]) -> Float[Array, "N"]:
    """1 for a node whose token is the greatest after its parent, else 0."""
    following = keys.best(logp)
    return (proposal.tokens == following[jnp.clip(proposal.tree.parent, 0)]).astype(logp.dtype)


def argmax_alone(proposal: Proposal, logp: Float[Array, "M V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    """All weight on the greatest."""
    row = logp[node]
    return jnp.where(jnp.arange(row.shape[0]) == keys.best(row), 0.0, -jnp.inf)


greedy = Verifier("greedy", is_argmax, argmax_alone, random=False, greedy_only=True)
"""A draft is kept iff it is the target's argmax. ``logp`` may be any log-weights, raw logits too.

Above temperature 0 it writes the argmax and not a draw: `jspec.speculative_sample` and
`jspec.generate` refuse it there."""
