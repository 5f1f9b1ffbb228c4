"""A draft model: any `Model` guesses the next K tokens one after another.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). The guesses are
drawn from the draft's own logits under the target's policy, each with the penalties of
its own prefix, and q is kept for the verifier; or they are its greatest tokens, as point
masses.

The cache holds all confirmed tokens, so the first guess costs no pass and K guesses
cost K - 1; `absorb` runs the emitted tokens through in one pass, which is also the
catch-up after a round in which everything was accepted. Symbols: W the draft's
vocabulary, V the target's. Static: K, greedy, V.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import ragged, tree
from jspec.sampling import keys, policy
from jspec.types import Context, Drafter, Emitted, Model, Params, Proposal


class Draft(NamedTuple):
    """The draft model's side of a row."""

    cache: Any  # of all confirmed tokens
    logits: Float[Array, "B V"]  # of the token after them


def model(
    draft: Model, num_speculative_tokens: int = 4, *, vocab_size: int | None = None, greedy: bool = False
) -> Drafter:
    """Build the drafter; its params are the draft model's.

    ``vocab_size``: the target's V (default: the draft's). A smaller draft vocabulary has
    q = 0 beyond its end; of a larger one, or of padding, the tokens beyond V are never
    proposed. Where the draft's context ends the row goes on without drafts.
    ``greedy``: propose the draft's greatest tokens, whatever the temperature.
    Raises ValueError for K < 1.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens = {num_speculative_tokens} should be at least 1")
    depth, vocab = num_speculative_tokens, vocab_size or draft.vocab_size

    def forward(params: Params, cache: Any, tokens: Int[Array, "B T"]):
        # The target may write ids that the draft does not have.
        known = jnp.minimum(tokens, draft.vocab_size - 1)
        hidden, _, cache = draft.forward(params, cache, known, tree.chain(*tokens.shape))
        return hidden, cache

    def unembed(params: Params, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        logits = draft.unembed(params, hidden[:, None])[:, 0, :vocab]
        missing = ((0, 0), (0, vocab - logits.shape[1]))
        return jnp.pad(logits, missing, constant_values=-jnp.inf)

    def init(params: Params, batch: int, slots: int, scratch: int) -> Draft:
        return Draft(draft.init_cache(batch, slots, scratch), jnp.zeros((batch, vocab), jnp.float32))

    def absorb(params: Params, state: Draft, emitted: Emitted) -> Draft:
        room = jnp.maximum(draft.max_length - state.cache.length, 0)
        count = jnp.minimum(emitted.count, room)
        hidden, cache = forward(params, state.cache, emitted.tokens)
        last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        logits = jnp.where((count > 0)[:, None], unembed(params, last), state.logits)
        return Draft(draft.commit(cache, None, count), logits)

    def propose(params: Params, state: Draft, root: Int[Array, "B"], context: Context):
        batch = root.shape[0]

        def guess(carry, index):
            """Draw draft number ``index`` (from 1), then run it for the logits of the next."""
            cache, logits, history, token = carry
            law = policy.apply(
                context.policy, history, token[:, None], tree.chain(batch, 1), logits[:, None]
            )[:, 0]
            token = keys.best(law) if greedy else _draw(context, index, law)
            token = token.astype(root.dtype)
            text = ragged.append(history.tokens, history.length, token[:, None], jnp.ones_like(root))
            history = history._replace(tokens=text, length=history.length + 1)
            return (cache, logits, history, token), law

        def guess_and_run(carry, index):
            (cache, _, history, token), law = guess(carry, index)
            hidden, cache = forward(params, cache, token[:, None])
            cache = draft.commit(cache, None, jnp.ones_like(root))
            return (cache, unembed(params, hidden[:, 0]), history, token), (token, law)

        start = (state.cache, state.logits, context.history, root)
        carry, (tokens, laws) = jax.lax.scan(guess_and_run, start, jnp.arange(1, depth))
        (cache, _, _, token), law = guess(carry, depth)
        drafts = jnp.concatenate([root[None], tokens, token[None]]).swapaxes(0, 1)
        laws = jnp.concatenate([jnp.zeros_like(law)[None], laws, law[None]]).swapaxes(0, 1)
        # Draft number d comes from the pass at position + d - 1, which must be in the context.
        count = 1 + jnp.clip(draft.max_length - context.position, 0, depth)
        proposal = Proposal(drafts, tree.chain(batch, depth + 1), count, None if greedy else laws)
        return proposal, state._replace(cache=cache._replace(length=state.cache.length))

    return Drafter(init, absorb, propose, nodes=depth + 1, depth=depth)


def _draw(context: Context, index: Int[Array, ""] | int, law: Float[Array, "B V"]) -> Int[Array, "B"]:
    each = jax.vmap(jax.random.fold_in)(keys.wrap(context.key), context.offset + index)
    return keys.draw_each(each, law)
