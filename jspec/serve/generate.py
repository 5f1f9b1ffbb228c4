"""`generate`: text in, text out, from Python; the `jspec` command is a shell around it.

Targets are loaded once and decoders compiled once for each setting and shape; both are
kept for the next call.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.decode import Decoder
from jspec.errors import JspecError, positive
from jspec.sample import make_request
from jspec.sampling import policy
from jspec.sampling.drafters import DraftConfig
from jspec.serve.draft import load_draft
from jspec.serve.metrics import Metrics, Seconds, summarize
from jspec.serve.stream import Clock, fetch, one_round
from jspec.serve.target import Target, load
from jspec.text.tokenizer import Detokenizer, Prompt, encode_prompt
from jspec.types import (
    FINISH_REASONS,
    RUNNING,
    STOP,
    Drafter,
    Info,
    Logprobs,
    Params,
    Policy,
    Request,
    State,
    Verifier,
)

CHUNK = 64  # prompt tokens a prefill pass
BUCKET = 128  # cache slots are a multiple of this, so that requests of similar size share a program


class Piece(NamedTuple):
    """A piece of text that has become certain. ``drafted``: its last token was the draft's."""

    row: int
    text: str
    drafted: bool


@dataclass(frozen=True)
class Generation:
    """One answer: text, tokens, why it ended, and what it cost.

    ``tokens``: the emitted ids, a stop token at their end included, those that only
    complete a stop string not. ``finish_reason``: "stop", "length" (the limit or the
    context) or "error" (the target's logits were no distribution: NaN).
    """

    text: str
    tokens: list[int]
    finish_reason: str
    metrics: Metrics
    logprobs: Logprobs | None = None  # a list of floats for each kind, where asked for


@overload
def generate(
    prompt: Prompt,
    *,
    target: str | Target = ...,
    draft: str | DraftConfig | Drafter | None = ...,
    draft_params: Params = ...,
    num_speculative_tokens: int | None = ...,
    max_new_tokens: int = ...,
    stop: str | Sequence[str] = ...,
    raw: bool = ...,
    dtype: str = ...,
    kernels: str = ...,
    seed: int | Sequence[int | None] | None = ...,
    verifier: str | Verifier = ...,
    logprobs: bool = ...,
    on_piece: Callable[[Piece], None] | None = ...,
    **sampling: Any,
) -> Generation: ...


@overload
def generate(
    prompt: Sequence[Prompt],
    *,
    target: str | Target = ...,
    draft: str | DraftConfig | Drafter | None = ...,
    draft_params: Params = ...,
    num_speculative_tokens: int | None = ...,
    max_new_tokens: int = ...,
    stop: str | Sequence[str] = ...,
    raw: bool = ...,
    dtype: str = ...,
    kernels: str = ...,
    seed: int | Sequence[int | None] | None = ...,
    verifier: str | Verifier = ...,
    logprobs: bool = ...,
    on_piece: Callable[[Piece], None] | None = ...,
    **sampling: Any,
) -> list[Generation]: ...


def generate(
    prompt: Prompt | Sequence[Prompt],
    *,
    target: str | Target = "smollm2",
    draft: str | DraftConfig | Drafter | None = None,
    draft_params: Params = None,
    num_speculative_tokens: int | None = None,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    raw: bool = False,
    dtype: str = "auto",
    kernels: str = "auto",
    seed: int | Sequence[int | None] | None = None,
    verifier: str | Verifier = "token",
    logprobs: bool = False,
    on_piece: Callable[[Piece], None] | None = None,
    **sampling: Any,
) -> Generation | list[Generation]:
    """Write what follows a prompt: text of exactly the target's distribution, in fewer passes.

    Args:
        prompt: a text, a conversation (a list of ``{"role", "content"}``), or a list of
            either, which runs as one ragged batch.
        target: "smollm2", a Hugging Face folder, a GGUF file, or what `load` gave.
        draft: a name or path ("ngram", prompt lookup, is the default; "none" is plain decoding), a
            `jspec.DraftConfig`, which also says how trees grow, or a `Drafter` of one's own.
        draft_params: of a `Drafter`.
        num_speculative_tokens: K, drafts a round in a chain; default: the draft's own, or 4.
        max_new_tokens: for each row; the target's context is another limit.
        stop: strings that end the text; the text ends before the first of them.
        raw: give the prompt as it is, without the chat template.
        dtype, kernels: see `load`; ignored for a loaded target.
        seed: of all rows, or one for each; a row's text depends on no other row's.
            None: a fresh one. Greedy text needs none.
        verifier: "token" (Leviathan et al.), "block" (Sun et al.), "coupled" (the same
            text whatever the draft, up to near ties), "greedy" (temperature 0 only), or
            "typical_lossy" (Medusa's typical acceptance, which changes the distribution).
        logprobs: keep the emitted tokens' log-probabilities.
        on_piece: called with each `Piece` of text as it comes. With it, or with stop
            strings, the host reads every round; else once in the whole generation.
        **sampling: of `jspec.sampling.policy.make`, one value or one for each prompt:
            temperature (default 0, greedy), top_k, top_p, min_p, repetition_penalty,
            presence_penalty, frequency_penalty, min_new_tokens, logit_bias, allowed, banned.

    Returns:
        A `Generation`, or a list of them for a list of prompts.

    Raises:
        JspecError: for a prompt that is empty or longer than the context, an unknown or
            unfit draft, a setting out of range, a target that cannot be loaded.

    >>> generate("", target="smollm2")
    Traceback (most recent call last):
    jspec.errors.JspecError: the prompt is empty
    """
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    prompts: Any = [prompt] if single else prompt
    positive("max_new_tokens", max_new_tokens)
    if not prompts:
        raise JspecError("there is no prompt: the list is empty")
    if not all(prompts):
        raise JspecError("the prompt is empty")
    loaded = load(target, dtype, kernels) if isinstance(target, str) else target
    if num_speculative_tokens is not None:
        if isinstance(draft, Drafter):
            raise JspecError("num_speculative_tokens is for a draft by name: a Drafter has its own")
        config = draft if isinstance(draft, DraftConfig) else DraftConfig(draft)
        draft = replace(config, num_speculative_tokens=num_speculative_tokens)
    rows = _policy(loaded, len(prompts), sampling)
    is_sampled = bool((np.asarray(sampling.get("temperature", 0.0)) > 0).any())
    found = load_draft(loaded, draft, draft_params, is_sampled=is_sampled)
    decoder = found.decoder(verifier, chunk=CHUNK, logprobs=logprobs)
    tokens = [encode_prompt(loaded.tokenizer, one, raw) for one in prompts]
    request = lay_out(loaded, decoder, tokens, rows, max_new_tokens, _seeds(seed, len(prompts)))
    job = Job(decoder, loaded.params, found.params, request)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    texts = [Detokenizer(loaded.tokenizer, stops) for _ in tokens]
    results = _run(job, texts) if on_piece is None and not stops else _stream(job, texts, on_piece)
    return results[0] if single else results


class Job(NamedTuple):
    """A batch ready to run: the compiled loop, its params and its request."""

    decoder: Decoder
    params: Params
    draft_params: Params
    request: Request

    def init(self, max_length: Array) -> State:
        return self.decoder.init(self.params, self.draft_params, self.request._replace(max_length=max_length))


def lay_out(
    target: Target,
    decoder: Decoder,
    prompts: list[list[int]],
    rows: Policy,
    max_new_tokens: int,
    seeds: Sequence[int],
    min_slots: int = 0,
) -> Request:
    """`jspec.make_request` with what a target's text ends with."""
    return make_request(
        decoder,
        prompts,
        key=seeds,
        policy=rows,
        max_new_tokens=max_new_tokens,
        stop_token_ids=target.stop_token_ids or None,
        slots_multiple=BUCKET,
        min_slots=min_slots,
    )


def _policy(target: Target, batch: int, sampling: dict[str, Any]) -> Policy:
    """The rows of the target distribution; ids that the tokenizer does not have are never written."""
    rows = policy.make(batch, target.model.vocab_size, **{"temperature": 0.0, **sampling})
    return rows._replace(bias=rows.bias.at[:, len(target.tokenizer) :].set(-jnp.inf))


def _seeds(seed: int | Sequence[int | None] | None, batch: int) -> list[int]:
    """One seed a row: its own, the one of all, or a fresh one."""
    seeds = list(seed) if isinstance(seed, Sequence | np.ndarray) else [seed] * batch
    return [secrets.randbits(63) if one is None else one for one in seeds]


# What each decoder has run; a decoder that nothing else holds is let go.
_compiled: weakref.WeakKeyDictionary[Decoder, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def _start(job: Job, streaming: bool) -> tuple[State, float, float]:
    """Compile what this shape has not run yet, then prefill: the state and both times.

    The programs are compiled by running them on rows that have already finished.
    """
    began = time.perf_counter()
    shapes = tuple(x.shape for x in job.request if isinstance(x, jax.Array))
    ran = _compiled.setdefault(job.decoder, set())
    if (shapes, streaming) not in ran:
        state = job.init(job.request.length)
        if streaming:
            state, _ = one_round(job.decoder, job.params, job.draft_params, state, Clock())
        else:
            state = job.decoder.run(job.params, job.draft_params, state)
        jax.block_until_ready(state)
        del state
        ran.add((shapes, streaming))
    compiled = time.perf_counter()
    state = jax.block_until_ready(job.init(job.request.max_length))
    return state, compiled - began, time.perf_counter() - compiled


def _read(state: State) -> tuple[Any, ...]:
    return fetch((state.tokens, state.length, state.prompt_length, state.finish, state.stats, state.logprobs))


def _run(job: Job, rows: list[Detokenizer]) -> list[Generation]:
    """The whole generation as one program and one host read."""
    state, compiled, prefilled = _start(job, streaming=False)
    began = time.perf_counter()
    read = _read(job.decoder.run(job.params, job.draft_params, state))
    seconds = Seconds(compiled, prefilled, time.perf_counter() - began)
    for row, tokens, end, start in zip(rows, *read[:3], strict=True):
        row.push(tokens[start:end].tolist())
    return _results(rows, read, seconds)


def _stream(job: Job, rows: list[Detokenizer], on_piece: Callable[[Piece], None] | None) -> list[Generation]:
    """Round by round: text as it comes, and an end at stop strings."""
    clock = Clock()
    state, compiled, prefilled = _start(job, streaming=True)
    began = time.perf_counter()
    overshoot: list[tuple[int, int, Info]] = []  # row, tokens of the round that counted, the round
    running = True
    while running:
        state, info = one_round(job.decoder, job.params, job.draft_params, state, clock)
        ended = [r.stopped or _push(r, index, info, on_piece, overshoot) for index, r in enumerate(rows)]
        codes = np.where(ended, STOP, info.finish)
        running = bool((codes == RUNNING).any())
        if (codes != info.finish).any():
            state = state._replace(finish=jnp.asarray(codes))
    read = _read(state)
    seconds = Seconds(compiled, prefilled, time.perf_counter() - began, clock.draft, clock.verify)
    stats = jax.tree.map(np.array, read[4])
    for index, counted, info in overshoot:  # nothing is counted after a stop string
        stats.proposed[index, counted : info.proposed[index]] -= 1
        stats.accepted[index, counted : info.accepted[index]] -= 1
    return _results(rows, (*read[:4], stats, read[5]), seconds, on_piece)


def _push(
    row: Detokenizer,
    index: int,
    info: Info,
    on_piece: Callable[[Piece], None] | None,
    overshoot: list[tuple[int, int, Info]],
) -> bool:
    """Give a row the tokens of a round; True once it has met a stop string."""
    for at, token in enumerate(info.tokens[index, : info.count[index]].tolist()):
        piece = row.push([token])
        if piece and on_piece:
            on_piece(Piece(index, piece, at < int(info.accepted[index])))
        if row.stopped:
            overshoot.append((index, at + 1, info))
            return True
    return False


def _results(
    rows: list[Detokenizer],
    read: tuple[Any, ...],
    seconds: Seconds,
    on_piece: Callable[[Piece], None] | None = None,
) -> list[Generation]:
    tokens, length, prompt_length, finish, stats, logprobs = read
    results, spans = [], []
    for index, row in enumerate(rows):
        rest = row.finish()
        if rest and on_piece:
            on_piece(Piece(index, rest, False))
        start = prompt_length[index]
        spans.append(slice(start, start + row.tokens_used if row.stopped else length[index]))
    emitted = [tokens[index, span].tolist() for index, span in enumerate(spans)]
    metrics = summarize(stats, prompt_length.tolist(), [len(e) for e in emitted], seconds)
    for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
        reason = FINISH_REASONS[STOP if row.stopped else int(finish[index])]
        own = logprobs and Logprobs(*(kind[index, span].tolist() for kind in logprobs))
        results.append(Generation(row.text, emitted[index], reason, metrics[index], own))
    return results
