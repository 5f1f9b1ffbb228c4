"""Bigram drafting: after each token comes what followed it last. The template of a drafter, in one file.

A state is a pytree that ``init`` allocates, ``absorb`` moves on and ``propose`` reads. Rows differ
in how many tokens they take in: ``emitted.count`` says how many of ``emitted.tokens`` are real, and
`jspec.ragged` has the helpers. The drafts are point masses (``logq`` None), so every
verifier keeps the target distribution whatever they are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import ragged, tree
from jspec.errors import positive
from jspec.once import built_once
from jspec.types import Context, Drafter, Emitted, Params, Proposal


class Text(NamedTuple):
    """The text so far."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]


@built_once
def bigram(num_speculative_tokens: int = 4) -> Drafter:
    """A drafter of K tokens, each the one that followed its predecessor last. Params: None.

    Args:
        num_speculative_tokens: K.

    Raises:
        JspecError: K < 1.

    >>> bigram(3).nodes
    4
    """
    depth = positive("num_speculative_tokens", num_speculative_tokens)

    def init(params: Params, batch: int, slots: int, scratch: int) -> Text:
        return Text(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def absorb(params: Params, state: Text, emitted: Emitted) -> Text:
        tokens = ragged.append(state.tokens, state.length, emitted.tokens, emitted.count)
        return Text(tokens, state.length + emitted.count)

    def propose(
        params: Params, state: Text, root: Int[Array, "B"], context: Context
    ) -> tuple[Proposal, Text]:
        slot = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)

        def follow(token: Int[Array, "B"], _: None) -> tuple[Array, Array]:
            seen = (state.tokens == token[:, None]) & (slot < state.length[:, None] - 1)
            latest = jnp.max(jnp.where(seen, slot, -1), axis=1)
            following = jnp.take_along_axis(state.tokens, latest[:, None] + 1, axis=1)[:, 0]
            following = jnp.where(latest < 0, -1, following)  # an id that is no token ends the draft
            return following, following

        drafts = jax.lax.scan(follow, root, length=depth)[1].T
        tokens = jnp.concatenate([root[:, None], drafts], axis=1)
        count = 1 + jnp.sum(jnp.cumprod(drafts >= 0, axis=1), axis=1, dtype=jnp.int32)
        return Proposal(tokens, tree.chain(*tokens.shape), count), state

    return Drafter(init, absorb, propose, nodes=depth + 1, depth=depth)
