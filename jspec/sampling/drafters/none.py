"""No drafting: K = 0. The decoder it makes is the plain one, with nothing added."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import tree
from jspec.types import Context, Drafter, Emitted, Params, Proposal


def none() -> Drafter:
    """The drafter of plain decoding: it proposes the root alone and keeps no state."""

    def init(params: Params, batch: int, slots: int, scratch: int) -> tuple[()]:
        return ()

    def absorb(params: Params, state: tuple[()], emitted: Emitted) -> tuple[()]:
        return ()

    def propose(params: Params, state: tuple[()], root: Int[Array, "B"], context: Context):
        batch = root.shape[0]
        return Proposal(root[:, None], tree.chain(batch, 1), jnp.ones((batch,), jnp.int32)), ()

    return Drafter(init, absorb, propose, nodes=1, depth=0)
