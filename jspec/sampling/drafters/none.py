"""No drafting: K = 0. The decoder it makes is the plain one, with nothing added."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import tree
from jspec.types import Context, Drafter, Emitted, Params, Proposal


def none(nodes: int = 1, growth: str = "chain") -> Drafter:
    """The drafter of plain decoding: it proposes the root alone and keeps no state.

    ``nodes``, ``growth``: the shape of its passes, where they are to be those of another
    drafter; nothing but the root counts in them.
    """

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
        return Proposal(tokens, layout, jnp.ones((batch,), jnp.int32)), ()

    return Drafter(init, absorb, propose, nodes=nodes, depth=nodes - 1, growth=growth)
