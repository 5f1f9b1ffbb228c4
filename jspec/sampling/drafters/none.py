"""Drafts without content: none at all (K = 0, the plain decoder), or copies of the root.

Both keep no state and cost nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import tree
from jspec.types import Context, Drafter, Emitted, Params, Proposal


def none(nodes: int = 1, growth: str = "chain") -> Drafter:
    """The drafter of plain decoding: it proposes the root alone.

    ``nodes``, ``growth``: the shape of its passes, where they are to be those of another
    drafter; nothing but the root counts in them.
    """
    return _copies(nodes, 1, growth)


def simulated(num_speculative_tokens: int) -> Drafter:
    """K copies of the root's token, for `jspec.sampling.lossy.simulated`.

    What a lossless rule keeps of them is an accident.
    """
    nodes = num_speculative_tokens + 1
    return _copies(nodes, nodes, "chain")


def _copies(nodes: int, count: int, growth: str) -> Drafter:
    def init(params: Params, batch: int, slots: int, scratch: int) -> tuple[()]:
        return ()

    def absorb(params: Params, state: tuple[()], emitted: Emitted) -> tuple[()]:
        return ()

    def propose(params: Params, state: tuple[()], root: Int[Array, "B"], context: Context):
        batch = root.shape[0]
        layout = tree.chain(batch, nodes)
        if growth == "tree":
            layout = tree.from_parents(jnp.full((batch, nodes), -1))
        tokens = jnp.broadcast_to(root[:, None], (batch, nodes))
        return Proposal(tokens, layout, jnp.full((batch,), count, jnp.int32)), ()

    return Drafter(init, absorb, propose, nodes=nodes, depth=nodes - 1, growth=growth)
