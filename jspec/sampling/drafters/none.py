"""Drafts without content: none at all (K = 0, the plain decoder), or copies of the root.

Both keep no state and cost nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import tree
from jspec.once import built_once
from jspec.types import Context, Drafter, Emitted, Params, Proposal


@built_once
def none(nodes: int = 1, growth: str = "chain") -> Drafter:
    """The drafter of plain decoding: it proposes the root alone. Params: None.

    Args:
        nodes: rows of a pass, where they are to be those of another drafter; nothing but the root
            counts in them.
        growth: "chain" or "tree", likewise.

    >>> none().nodes, none(5, "tree").growth
    (1, 'tree')
    """
    return _copies(nodes, 1, growth)


@built_once
def simulated(num_speculative_tokens: int) -> Drafter:
    """A drafter of K copies of the root's token, for `jspec.verifiers.simulated_lossy`. Params: None.

    What a lossless verifier keeps of them is an accident.

    Args:
        num_speculative_tokens: K.

    >>> simulated(3).nodes
    4
    """
    nodes = num_speculative_tokens + 1
    return _copies(nodes, nodes, "chain")


def _copies(nodes: int, count: int, growth: str) -> Drafter:
    def init(params: Params, batch: int, slots: int, scratch: int) -> tuple[()]:
        return ()

    def absorb(params: Params, state: tuple[()], emitted: Emitted) -> tuple[()]:
        return ()

    def propose(
        params: Params, state: tuple[()], root: Int[Array, "B"], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        batch = root.shape[0]
        layout = tree.chain(batch, nodes)
        if growth == "tree":
            layout = tree.from_parents(jnp.full((batch, nodes), -1))
        tokens = jnp.broadcast_to(root[:, None], (batch, nodes))
        return Proposal(tokens, layout, jnp.full((batch,), count, jnp.int32)), ()

    return Drafter(init, absorb, propose, nodes=nodes, depth=nodes - 1, growth=growth)
