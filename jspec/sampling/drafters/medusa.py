"""Medusa: several heads on the target's last feature, each guessing one depth (arXiv 2401.10774).

Head m guesses the token m + 2 places after its feature: the newest feature predicted the
root, so the heads guess its children, grandchildren, ... None sees another's guess, so a
tree of ranks covers their combinations. Tokens are point masses: with a lossless rule the
text has the target's law. Before the first feature nothing is proposed.
Static: the heads, the shape, V.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.sampling import grow
from jspec.shapes import Shape
from jspec.types import Context, Drafter, Emitted, Heads, Params


class Newest(NamedTuple):
    """The feature that predicted the root. ``seen``: 0 before x_0, 1 before the first feature."""

    feature: Float[Array, "B E"]
    begun: Bool[Array, "B"]  # x_0 has been seen
    ready: Bool[Array, "B"]  # and a token that came with a feature


def medusa(heads: Heads, shape: Shape, *, vocab_size: int) -> Drafter:
    """Build the drafter; ``vocab_size`` is the target's V. Raises ValueError for too deep a shape."""
    if shape.depth > heads.count:
        raise ValueError(f"a tree of depth {shape.depth} needs as many heads, not {heads.count}")

    def init(params: Params, batch: int, slots: int, scratch: int) -> Newest:
        no = jnp.zeros((batch,), bool)
        return Newest(jnp.zeros((batch, heads.feature_width), jnp.float32), no, no)

    def absorb(params: Params, state: Newest, emitted: Emitted) -> Newest:
        last = jnp.maximum(emitted.count - 1, 0)[:, None, None]
        feature = jnp.take_along_axis(emitted.features, last, axis=1)[:, 0].astype(state.feature.dtype)
        some = emitted.count > 0
        ready = state.ready | (state.begun & some) | (emitted.count > 1)
        return Newest(jnp.where(some[:, None], feature, state.feature), state.begun | some, ready)

    def propose(params: Params, state: Newest, root: Int[Array, "B"], context: Context):
        logits = heads.forward(params, state.feature[:, None])[:, 0]
        writer = grow.Writer(lambda *rows: rows, params.get("ids"), vocab_size)
        proposal = grow.marginals(shape, logits, writer, root)
        return proposal._replace(count=jnp.where(state.ready, proposal.count, 1)), state

    growth = "chain" if shape.is_chain else "tree"
    return Drafter(init, absorb, propose, nodes=len(shape.parent), depth=shape.depth, growth=growth)
