"""N-gram drafting, also known as prompt lookup: copy what followed the same words before.

Saxena's prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); vLLM's
``ngram``. The longest suffix of the text, ``max_ngram`` tokens at most and ``min_ngram``
at least, that also occurs earlier is found on the device, and the K tokens after that
occurrence are proposed. A continuation that reaches the end of the text goes on with
itself, so that a loop of any period is drafted in full.

Symbols: x the text, n its length, run_i how many tokens before and at i equal those
before and at n - 1. Static: K, min_ngram, max_ngram, match. The drafts are point masses.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import ragged, tree
from jspec.errors import JspecError, positive
from jspec.once import built_once
from jspec.types import Context, Drafter, Emitted, Params, Proposal


class History(NamedTuple):
    """The text so far."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]


MATCHES = ("latest", "most_frequent")


@built_once
def ngram(
    num_speculative_tokens: int = 4,
    *,
    min_ngram: int = 3,
    max_ngram: int = 5,
    match: str = "latest",
) -> Drafter:
    """A drafter that copies what followed the same words earlier (prompt lookup). Params: None.

    Args:
        num_speculative_tokens: K.
        min_ngram: the least number of tokens that have to be the same; below it nothing is proposed.
        max_ngram: the most that are compared.
        match: which occurrence of the longest suffix: the "latest", or the latest of those whose
            next token is the "most_frequent" one.

    Raises:
        JspecError: K < 1, ``1 <= min_ngram <= max_ngram`` not holding, an unknown match.

    >>> ngram(4, min_ngram=1).nodes
    5
    """
    positive("num_speculative_tokens", num_speculative_tokens)
    if not 1 <= min_ngram <= max_ngram:
        raise JspecError(f"min_ngram {min_ngram}, max_ngram {max_ngram}: 1 <= min <= max should hold")
    if match not in MATCHES:
        raise JspecError(f"match {match!r} should be one of {', '.join(MATCHES)}")

    def init(params: Params, batch: int, slots: int, scratch: int) -> History:
        return History(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def absorb(params: Params, state: History, emitted: Emitted) -> History:
        tokens = ragged.append(state.tokens, state.length, emitted.tokens, emitted.count)
        return History(tokens, state.length + emitted.count)

    def propose(
        params: Params, state: History, root: Int[Array, "B"], context: Context
    ) -> tuple[Proposal, History]:
        def row(tokens: Array, length: Array) -> tuple[Array, Array]:
            return lookup(tokens, length, num_speculative_tokens, min_ngram, max_ngram, match)

        drafts, found = jax.vmap(row)(state.tokens, state.length)
        tokens = jnp.concatenate([root[:, None], drafts], axis=1)
        count = jnp.where(found, num_speculative_tokens + 1, 1)
        return Proposal(tokens, tree.chain(*tokens.shape), count), state

    nodes = num_speculative_tokens + 1
    return Drafter(init, absorb, propose, nodes=nodes, depth=num_speculative_tokens)


def lookup(
    tokens: Int[Array, "S"], length: Int[Array, ""], count: int, min_ngram: int, max_ngram: int, match: str
) -> tuple[Int[Array, "K"], Array]:
    """The continuation of the best earlier occurrence of one row's suffix, and if there is one.

    >>> text = jnp.array([5, 6, 7, 8, 5, 6, 0, 0])
    >>> drafts, found = lookup(text, jnp.array(6), 3, 2, 4, "latest")
    >>> drafts.tolist(), bool(found)
    ([7, 8, 5], True)
    """
    index = jnp.arange(tokens.shape[0])
    back = jnp.arange(max_ngram)
    suffix = tokens[jnp.clip(length - 1 - back, 0)]
    before = index[:, None] - back
    same = (tokens[jnp.clip(before, 0)] == suffix) & (before >= 0)
    run = jnp.cumprod(same, axis=1).sum(axis=1)
    run = jnp.where(index < length - 1, run, 0)
    longest = jnp.max(run)
    candidate = run == longest
    if match == "most_frequent":
        following = jnp.where(candidate, jnp.roll(tokens, -1), -1)
        ordered = jnp.sort(following)
        first, last = (jnp.searchsorted(ordered, following, side=side) for side in ("left", "right"))
        votes = jnp.where(candidate, last - first, 0)
        candidate &= votes == jnp.max(votes)
    start = jnp.max(jnp.where(candidate, index, 0)) + 1
    period = jnp.maximum(length - start, 1)
    return tokens[start + jnp.arange(count) % period], longest >= min_ngram
