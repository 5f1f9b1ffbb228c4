"""The distribution of the whole compiled loop: what a batch of many rows wrote, against the enumerated.

The batch is mixed and ragged: each group has a prompt and settings of its own. The distribution of
a group's first tokens is enumerated by running the target, without cache or loop, over
every text. Symbols: χ², with n the rows of a group. A right program gives p-values spread
evenly over (0, 1); a mistake in accepting, in the residual, in keys or in positions puts
some of them at 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import stats

from jspec import tree
from jspec.certify.exact import check_lossless
from jspec.decode import Decoder, make_decoder
from jspec.errors import JspecError
from jspec.rounds import Decide
from jspec.sample import make_request
from jspec.sampling import distribution, walk
from jspec.sampling.drafters.none import none
from jspec.sampling.policy import SETTINGS, make
from jspec.serve.stream import fetch
from jspec.types import Drafter, History, Model, Params, Policy, Request, State, Verifier

LENGTH, SLOTS = 4, 64
VOCABULARIES = range(5, 9)  # sizes that have the tokens below, and whose texts can be enumerated


class Group(NamedTuple):
    """Rows that share a prompt and settings of `jspec.sampling.policy.make`."""

    prompt: list[int]
    settings: dict[str, Any]
    stop: tuple[int, ...] = (-1,)


GROUPS = (
    Group([1, 2, 3], {}),
    Group([4], dict(temperature=0.8, top_k=3, min_p=0.02)),
    Group([0, 1, 2, 3, 4, 0, 1], dict(temperature=1.4, top_p=0.8)),
    Group([2, 2], dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.4)),
    Group([3, 3, 1], dict(temperature=0.0)),
    Group([3, 0], dict(logit_bias={1: 2.0}, banned=[2], min_new_tokens=2), stop=(4,)),
)
"""Plain sampling, truncations, penalties that see the draft's own prefix, a greedy
neighbour, and a stop token that may come only after two others; prompts of every length."""


class ChiSquare(NamedTuple):
    """``p_values``: one for each of `GROUPS`. ``acceptance_rate``: of all drafts; None without any."""

    verifier: str
    rows: int
    p_values: list[float]
    acceptance_rate: float | None


def chi_square(
    target: Model,
    params: Params,
    drafter: Drafter,
    draft_params: Params,
    verifier: Verifier,
    *,
    rows: int = 4000,
    first_seed: int = 0,
    decide: Decide = walk.decide,
) -> ChiSquare:
    """Run a mixed batch through the whole loop and test its texts against the target's distribution.

    For any target of 5 to 8 tokens and any drafter, on the default device, in the dtype
    of its params. ``rows``: of each group; their seeds count up from ``first_seed``.
    ``decide``: as in `jspec.make_decoder`.

    Raises:
        JspecError: a lossy verifier, one that does not fit the drafter, or a target of
            another vocabulary size.

    >>> from jspec.certify.tiny import tiny
    >>> from jspec.sampling.drafters.ngram import ngram
    >>> from jspec.sampling.verifiers import token
    >>> found = chi_square(*tiny(0), ngram(2, min_ngram=1), None, token, rows=500)
    >>> min(found.p_values) > 1e-5
    True
    """
    check_lossless(verifier)
    if target.vocab_size not in VOCABULARIES:
        raise JspecError(
            f"the distribution of {target.vocab_size} tokens cannot be enumerated: give a target of "
            f"{VOCABULARIES.start} to {VOCABULARIES.stop - 1}"
        )
    decoder = make_decoder(target, drafter, verifier, chunk=4, decide=decide)
    asked, group = request(decoder, rows, first_seed)
    state = decoder.run(params, draft_params, decoder.init(params, draft_params, asked))
    written = new_tokens(state)
    values = [
        p_value([*itertools.compress(written, group == index)], enumerated(target, params, index))
        for index in range(len(GROUPS))
    ]
    counts = fetch(state.stats)
    proposed = int(counts.proposed.sum())
    rate = int(counts.accepted.sum()) / proposed if proposed else None
    return ChiSquare(verifier.name, rows, values, rate)


def coupled_differences(
    target: Model,
    params: Params,
    drafter: Drafter,
    draft_params: Params,
    verifier: Verifier,
    rows: int = 500,
    decide: Decide = walk.decide,
) -> int:
    """Rows whose text is not the one that plain decoding writes with the same seeds.

    0 for a verifier that is coupled, up to ties within rounding.
    """

    def written(drafter: Drafter, draft_params: Params) -> list[list[int]]:
        loop = make_decoder(target, drafter, verifier, chunk=4, decide=decide)
        asked, _ = request(loop, rows)
        return new_tokens(loop.run(params, draft_params, loop.init(params, draft_params, asked)))

    pairs = zip(written(drafter, draft_params), written(none(), None), strict=True)
    return sum(one != other for one, other in pairs)


def request(decoder: Decoder, rows: int, first_seed: int = 0) -> tuple[Request, np.ndarray]:
    """``rows`` rows of each group, shuffled together; and which group each row is of."""
    group = np.random.default_rng(0).permutation(np.arange(rows * len(GROUPS)) % len(GROUPS))
    asked = make_request(
        decoder,
        [GROUPS[g].prompt for g in group],
        key=range(first_seed, first_seed + len(group)),
        policy=jax.tree.map(lambda x: x[group], policy_of_groups(decoder.vocab_size)),
        max_new_tokens=LENGTH,
        stop_token_ids=[GROUPS[g].stop for g in group],
        slots_multiple=SLOTS,
    )
    return asked, group


def policy_of_groups(vocab: int) -> Policy:
    """One row of settings for each group."""
    neutral = {name: setting.neutral for name, setting in SETTINGS.items()} | dict(logit_bias=None, banned=())
    settings = {name: [g.settings.get(name, value) for g in GROUPS] for name, value in neutral.items()}
    return make(len(GROUPS), vocab, **settings)


def new_tokens(state: State) -> list[list[int]]:
    """What each row wrote."""
    read = fetch((state.tokens, state.prompt_length, state.length))
    return [row[start:end].tolist() for row, start, end in zip(*read, strict=True)]


def enumerated(target: Model, params: Params, group: int) -> dict[tuple[int, ...], float]:
    """The distribution of a group's first LENGTH tokens, by running the target over every text."""
    prompt, _, stop = GROUPS[group]
    vocab = target.vocab_size
    batch = vocab ** (LENGTH - 1)
    rows = jax.tree.map(lambda x: jnp.repeat(x[group : group + 1], batch, 0), policy_of_groups(vocab))
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for size in range(LENGTH):
        texts = [text for text in probs if len(text) == size and not set(text) & set(stop)]
        tokens = np.zeros((batch, SLOTS), np.int32)
        for row, text in enumerate((texts * batch)[:batch]):
            tokens[row, : len(prompt) + size] = [*prompt, *text]
        found = _log_probs(target)(params, rows, tokens, len(prompt) + size, len(prompt), np.array(stop))
        for text, row in zip(texts, np.exp(np.asarray(found, np.float64)), strict=False):
            mass = probs.pop(text)
            probs |= {(*text, token): mass * p for token, p in enumerate(row) if p > 0}
    return probs


@functools.lru_cache(maxsize=16)
def _log_probs(target: Model) -> Callable[..., Array]:
    """log p of what follows each text; all texts are of one length."""

    @jax.jit
    def log_probs(
        params: Params, policy: Policy, tokens: Array, length: Array, prompt_length: Array, stop: Array
    ) -> Array:
        batch = tokens.shape[0]
        layout = tree.chain(batch, SLOTS)
        hidden, _, _ = target.forward(params, target.init_cache(batch, SLOTS), tokens, layout)
        logits = target.unembed(params, hidden[:, length - 1][:, None])
        end, start = (jnp.full((batch,), size, jnp.int32) for size in (length, prompt_length))
        history = History(tokens, end, start, jnp.broadcast_to(stop.astype(jnp.int32), (batch, *stop.shape)))
        root = tokens[:, length - 1][:, None]
        return distribution.log_probs(policy, history, root, tree.chain(batch, 1), logits)[:, 0]

    return log_probs


def p_value(texts: Sequence[Sequence[int]], probs: dict[tuple[int, ...], float]) -> float:
    """χ² of the texts against a distribution; outcomes that are expected fewer than 5 times are put together.

    0.0 for a text that the distribution does not have.

    >>> round(p_value([(0,)] * 40 + [(1,)] * 60, {(0,): 0.5, (1,): 0.5}), 3)
    0.046
    """
    seen: dict[tuple[int, ...], int] = dict.fromkeys(probs, 0)
    for text in map(tuple, texts):
        if text not in seen:
            return 0.0
        seen[text] += 1
    expected = np.array(list(probs.values())) * len(texts) / sum(probs.values())
    counts = np.array(list(seen.values()))
    rare = expected < 5
    pairs = [*itertools.compress(zip(counts, expected, strict=True), ~rare)]
    if rare.any():
        pairs.append((counts[rare].sum(), expected[rare].sum()))
    if len(pairs) == 1:
        return 1.0
    found, wanted = zip(*pairs, strict=True)
    return float(stats.chisquare(found, wanted).pvalue)
