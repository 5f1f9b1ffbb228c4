"""Medusa: several heads on the target's last feature, each guessing one depth (arXiv 2401.10774).

Head m guesses the token m + 2 places after its feature: the newest feature predicted the
root, so the heads guess its children, grandchildren, ... None sees another's guess, so a
tree of ranks covers their combinations. Tokens are point masses: with a lossless verifier the
text has the target's distribution. Before the first feature nothing is proposed.
Static: the heads, the shape, V.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.errors import JspecError
from jspec.models.heads import Heads
from jspec.once import built_once
from jspec.sampling import grow
from jspec.tree import TreeShape
from jspec.types import Context, Drafter, Emitted, Params, Proposal


class Newest(NamedTuple):
    """The feature that predicted the root. ``seen``: 0 before x_0, 1 before the first feature."""

    feature: Float[Array, "B E"]
    begun: Bool[Array, "B"]  # x_0 has been seen
    ready: Bool[Array, "B"]  # and a token that came with a feature


@built_once
def medusa(heads: Heads, shape: TreeShape, *, vocab_size: int) -> Drafter:
    """A drafter that fills a shape with what Medusa's heads guess for each depth. Params: the heads'.

    Args:
        heads: the network, `jspec.models.heads.Heads`.
        shape: of the drafts, no deeper than there are heads: `jspec.tree.chain_shape`, `likeliest`.
        vocab_size: the target's V.

    Raises:
        JspecError: too deep a shape.

    >>> from jspec import tree
    >>> from jspec.models.heads.medusa import Config, make
    >>> heads = make(Config(hidden_size=8, vocab_size=50, heads=3, blocks=1))
    >>> medusa(heads, tree.likeliest(10, depth=3, topk=4), vocab_size=50).nodes
    11
    """
    if shape.depth > heads.count:
        raise JspecError(f"a tree of depth {shape.depth} needs as many heads, not {heads.count}")

    def init(params: Params, batch: int, slots: int, scratch: int) -> Newest:
        no = jnp.zeros((batch,), bool)
        return Newest(jnp.zeros((batch, heads.feature_size), jnp.float32), no, no)

    def absorb(params: Params, state: Newest, emitted: Emitted) -> Newest:
        last = jnp.maximum(emitted.count - 1, 0)[:, None, None]
        feature = jnp.take_along_axis(emitted.features, last, axis=1)[:, 0].astype(state.feature.dtype)
        some = emitted.count > 0
        ready = state.ready | (state.begun & some) | (emitted.count > 1)
        return Newest(jnp.where(some[:, None], feature, state.feature), state.begun | some, ready)

    def propose(
        params: Params, state: Newest, root: Int[Array, "B"], context: Context
    ) -> tuple[Proposal, Newest]:
        logits = heads.forward(params, state.feature[:, None])[:, 0]
        writer = grow.Writer(lambda *rows: rows, params.get("ids"), vocab_size)
        proposal = grow.marginals(shape, logits, writer, root)
        return proposal._replace(count=jnp.where(state.ready, proposal.count, 1)), state

    growth = "chain" if shape.is_chain else "tree"
    return Drafter(init, absorb, propose, nodes=len(shape.parent), depth=shape.depth, growth=growth)
