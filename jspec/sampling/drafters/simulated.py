"""Drafts without content, for `jspec.sampling.lossy.simulated`: the root's token, K times, at no cost."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import tree
from jspec.types import Context, Drafter, Emitted, Params, Proposal


def simulated(num_speculative_tokens: int) -> Drafter:
    """Build the drafter. What a lossless rule keeps of its drafts is an accident."""
    nodes = num_speculative_tokens + 1

    def init(params: Params, batch: int, slots: int, scratch: int) -> tuple[()]:
        return ()

    def absorb(params: Params, state: tuple[()], emitted: Emitted) -> tuple[()]:
        return ()

    def propose(params: Params, state: tuple[()], root: Int[Array, "B"], context: Context):
        batch = root.shape[0]
        tokens = jnp.broadcast_to(root[:, None], (batch, nodes))
        return Proposal(tokens, tree.chain(batch, nodes), jnp.full((batch,), nodes)), ()

    return Drafter(init, absorb, propose, nodes=nodes, depth=num_speculative_tokens)
