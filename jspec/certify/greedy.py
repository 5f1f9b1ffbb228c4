"""Greedy text with a draft against that of the plain decoder, token by token.

A pass over K + 1 rows and one over a single row add in different orders, so where the two
best logits are closer than rounding error the texts may part: a **tie flip**. Any other
difference is a **fault**. In the same-shape mode the plain decoder runs the very program
of the draft, K + 1 rows wide; there a difference of a single bit is a fault.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec import tree
from jspec.certify.exact import check_lossless
from jspec.rounds import Decide
from jspec.sample import Samples, speculative_sample
from jspec.sampling import verifiers, walk
from jspec.sampling.drafters.none import none
from jspec.serve.stream import fetch
from jspec.types import Drafter, Model, Params, Verifier

TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.25}
"""How far apart two logits may be for a tie flip, by the params' dtype."""


class Difference(NamedTuple):
    """The first difference of a prompt's texts; ``position`` counts new tokens from 0."""

    prompt: int
    position: int
    plain: int  # the plain decoder's token; -1 where its text had ended
    drafted: int
    margin: float  # between the two best logits there
    verdict: str  # "tie flip" or "fault"


class Greedy(NamedTuple):
    """``tokens``: new ones compared and found equal. ``differences``: at most one a prompt."""

    prompts: int
    tokens: int
    accept_length: float  # tokens a target pass, bonus counted
    differences: list[Difference]
    same_shape: bool

    @property
    def faults(self) -> int:
        return sum(difference.verdict == "fault" for difference in self.differences)


def greedy_text(
    target: Model,
    params: Params,
    drafter: Drafter,
    draft_params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_token_ids: Sequence[int] = (),
    verifier: Verifier = verifiers.token,
    tolerance: float | None = None,
    same_shape: bool = False,
    batch: int = 4,
    decide: Decide = walk.decide,
) -> Greedy:
    """Compare greedy texts with and without the drafter, over ragged batches of ``batch`` prompts.

    ``tolerance``: default by the dtype of the params, `TOLERANCE`. Raises `JspecError` for
    a lossy verifier or one that does not fit the drafter, and for a prompt that is too long.

    >>> from jspec.certify.tiny import tiny
    >>> from jspec.sampling.drafters.ngram import ngram
    >>> found = greedy_text(*tiny(0), ngram(2, min_ngram=1), None, [[1, 2, 1], [3]], same_shape=True)
    >>> found.tokens + 64 * len(found.differences) >= 2 * 60, found.faults
    (True, 0)
    """
    check_lossless(verifier)
    if tolerance is None:
        kinds = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
        tolerance = TOLERANCE.get(str(jnp.result_type(*kinds)), 1e-3)
    plain = none(drafter.nodes, drafter.growth) if same_shape else none()
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, stop_token_ids=list(stop_token_ids) or None)
    options |= dict(skip_empty_rounds=not same_shape, decide=decide)
    batch, width = min(batch, len(prompts)), max(map(len, prompts))
    passes = written = 0
    equal: list[int] = []
    differences: list[Difference] = []
    for start in range(0, len(prompts), batch):
        # The last batch is filled up, so that all of them share their programs.
        rows = [prompts[index % len(prompts)] for index in range(start, start + batch)]
        with_draft = _write(target, params, drafter, draft_params, rows, width, verifier=verifier, **options)
        without = _write(target, params, plain, None, rows, width, verifier=verifiers.token, **options)
        for row, prompt in enumerate(rows[: len(prompts) - start]):
            passes += int(with_draft.stats.rounds[row])
            written += int(with_draft.length[row])
            at = _first_difference(with_draft, without, row, bits=same_shape)
            equal.append(int(with_draft.length[row]) if at is None else at)
            if at is None:
                continue
            one, other = (int(s.tokens[row, at]) if at < s.length[row] else -1 for s in (without, with_draft))
            margin, gap = _margin(target, params, [*prompt, *without.tokens[row, :at].tolist()], one, other)
            verdict = "tie flip" if gap <= tolerance and not same_shape else "fault"
            differences.append(Difference(start + row, at, one, other, margin, verdict))
    return Greedy(len(prompts), sum(equal), written / max(passes, 1), differences, same_shape)


def _write(target, params, drafter, draft_params, prompts, width, **options) -> Samples:
    """Greedy samples, read to the host."""
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    samples = speculative_sample(
        params,
        jnp.asarray(tokens),
        target=target,
        key=[0] * len(prompts),
        drafter=drafter,
        draft_params=draft_params,
        prompt_length=jnp.array([len(prompt) for prompt in prompts]),
        temperature=0,
        logprobs=True,
        **options,
    )
    return fetch(samples)


def _first_difference(one: Samples, other: Samples, row: int, bits: bool) -> int | None:
    """Where a row's tokens, or with ``bits`` also their raw log-probabilities, part."""
    assert one.logprobs is not None and other.logprobs is not None
    differ = one.tokens[row] != other.tokens[row]
    if bits:
        differ = differ | (one.logprobs.raw[row] != other.logprobs.raw[row])
    shorter = min(one.length[row], other.length[row])
    if differ[:shorter].any():
        return int(np.argmax(differ[:shorter]))
    return int(shorter) if one.length[row] != other.length[row] else None


def _margin(target: Model, params: Params, text: list[int], plain: int, drafted: int) -> tuple[float, float]:
    """After a text: between the two best logits, and between the two tokens' (inf where one is absent)."""
    slots = -(-len(text) // 64) * 64
    tokens = jnp.zeros((1, slots), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    logits = np.asarray(_logits(target)(params, tokens, len(text) - 1), np.float64)
    second, best = np.sort(logits)[-2:]
    gap = abs(logits[plain] - logits[drafted]) if min(plain, drafted) >= 0 else np.inf
    return float(best - second), float(gap)


@functools.lru_cache(maxsize=8)
def _logits(target: Model):
    """The logits after position ``last`` of one text, in one pass and without a window's ring."""

    @jax.jit
    def logits(params: Params, tokens: Array, last: Array | int) -> Array:
        slots = tokens.shape[1]
        hidden, _, _ = target.forward(params, target.init_cache(1, slots), tokens, tree.chain(1, slots))
        return target.unembed(params, hidden[:, last][:, None])[0, 0]

    return logits
