"""A draft model: any `Model` guesses the next K tokens one after another.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). The guesses are
drawn from the draft's own logits under the target's policy, each with the penalties of
its own prefix, and q is kept for the verifier; or they are its greatest tokens, as point
masses.

The cache holds all confirmed tokens, so the first guess costs no pass and K guesses
cost K - 1; `absorb` runs the emitted tokens through in one pass, which is also the
catch-up after a round in which everything was accepted. The guesses' own keys and values are
scratch rows of a chain in several passes: nothing is committed for them, and nothing undone.
Symbols: W the draft's vocabulary, V the target's. Static: K, greedy, V.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import ragged, tree
from jspec.errors import positive
from jspec.once import built_once
from jspec.sampling import distribution, keys
from jspec.types import Context, Drafter, Emitted, History, Model, Params, Proposal


class DraftState(NamedTuple):
    """The draft model's side of a row."""

    cache: Any  # of all confirmed tokens
    logits: Float[Array, "B V"]  # of the token after them


class _Writing(NamedTuple):
    """What a proposal carries from guess to guess."""

    cache: Any
    logits: Float[Array, "B V"]  # of the next token
    history: History
    token: Int[Array, "B"]  # the newest


@built_once
def draft_model(
    draft: Model, num_speculative_tokens: int = 4, *, vocab_size: int | None = None, greedy: bool = False
) -> Drafter:
    """A drafter that draws K tokens from a smaller model. Params: the draft model's.

    Args:
        draft: the draft model.
        num_speculative_tokens: K.
        vocab_size: the target's V (default: the draft's). A smaller draft vocabulary has
            q = 0 beyond its end; of a larger one, or of padding, the tokens beyond V are never
            proposed. Where the draft's context ends the row goes on without drafts.
        greedy: propose the draft's greatest tokens, whatever the temperature.

    Raises:
        JspecError: K < 1.

    >>> from jspec.models import table
    >>> draft_model(table.make(5), 3).nodes
    4
    """
    depth, vocab = positive("num_speculative_tokens", num_speculative_tokens), vocab_size or draft.vocab_size

    def forward(
        params: Params, cache: Any, tokens: Int[Array, "B T"], start: Array | int = 0
    ) -> tuple[Float[Array, "B T D"], Any]:
        # The target may write ids that the draft does not have.
        known = jnp.clip(tokens, 0, draft.vocab_size - 1)
        hidden, _, cache = draft.forward(
            params, cache, known, tree.chain(tokens.shape[0], tokens.shape[1], start)
        )
        return hidden, cache

    def unembed(params: Params, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        logits = draft.unembed(params, hidden[:, None])[:, 0, :vocab]
        missing = ((0, 0), (0, vocab - logits.shape[1]))
        return jnp.pad(logits, missing, constant_values=-jnp.inf)

    def init(params: Params, batch: int, slots: int, scratch: int) -> DraftState:
        return DraftState(draft.init_cache(batch, slots, scratch), jnp.zeros((batch, vocab), jnp.float32))

    def absorb(params: Params, state: DraftState, emitted: Emitted) -> DraftState:
        room = jnp.maximum(draft.context_length - state.cache.length, 0)
        count = jnp.minimum(emitted.count, room)
        hidden, cache = forward(params, state.cache, emitted.tokens)
        last = ragged.last(hidden, count)
        logits = jnp.where((count > 0)[:, None], unembed(params, last), state.logits)
        return DraftState(draft.commit(cache, None, count), logits)

    def propose(
        params: Params, state: DraftState, root: Int[Array, "B"], context: Context
    ) -> tuple[Proposal, DraftState]:
        batch = root.shape[0]

        def guess(carry: _Writing, index: Int[Array, ""] | int) -> tuple[_Writing, Array]:
            """Draw draft number ``index`` (from 1)."""
            cache, logits, history, token = carry
            logp = distribution.log_probs(
                context.policy, history, token[:, None], tree.chain(batch, 1), logits[:, None]
            )[:, 0]
            token = keys.best(logp) if greedy else _draw(context, index, logp)
            token = token.astype(root.dtype)
            text = ragged.append(history.tokens, history.length, token[:, None], jnp.ones_like(root))
            history = history._replace(tokens=text, length=history.length + 1)
            return _Writing(cache, logits, history, token), logp

        def guess_and_run(carry: _Writing, index: Int[Array, ""]) -> tuple[_Writing, tuple[Array, Array]]:
            """Draw, then run it for the logits of the next: it is scratch row ``index - 1`` of the round."""
            (cache, _, history, token), logp = guess(carry, index)
            hidden, cache = forward(params, cache, token[:, None], index - 1)
            return _Writing(cache, unembed(params, hidden[:, 0]), history, token), (token, logp)

        start = _Writing(state.cache, state.logits, context.history, root)
        carry, (tokens, logps) = jax.lax.scan(guess_and_run, start, jnp.arange(1, depth, dtype=jnp.int32))
        (cache, _, _, token), logp = guess(carry, depth)
        drafts = jnp.concatenate([root[None], tokens, token[None]]).swapaxes(0, 1)
        logq = jnp.concatenate([jnp.zeros_like(logp)[None], logps, logp[None]]).swapaxes(0, 1)
        # Draft number d comes from the pass at position + d - 1, which must be in the context.
        count = 1 + jnp.clip(draft.context_length - context.position, 0, depth)
        proposal = Proposal(drafts, tree.chain(batch, depth + 1), count, None if greedy else logq)
        return proposal, state._replace(cache=cache)

    return Drafter(init, absorb, propose, nodes=depth + 1, depth=depth)


def _draw(context: Context, index: Int[Array, ""] | int, logp: Float[Array, "B V"]) -> Int[Array, "B"]:
    each = jax.vmap(jax.random.fold_in)(keys.wrap(context.key), context.offset + index)
    return keys.draw_each(each, logp)
