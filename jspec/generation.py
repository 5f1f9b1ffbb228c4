"""`generate`: text in, text out, from Python; the `jspec` command is a shell around it.

Targets are loaded once and decoders compiled once for each setting and shape; both are
kept for the next call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import checkpoint, decode, smollm2, text
from jspec.errors import JspecError
from jspec.metrics import Metrics, Seconds, summarize
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.sampling.verify import greedy
from jspec.types import FINISH_REASONS, RUNNING, STOP, Drafter, Info, Model, Params, State

CHUNK = 64  # prompt tokens a prefill pass
BUCKET = 128  # cache slots are a multiple of this, so that requests of similar size share a program
DRAFTS: dict[str, Callable[[int], Drafter]] = {"none": lambda _: none(), "ngram": ngram}
"""``draft=`` -> what makes the drafter of K tokens."""


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target: what `generate` needs of it."""

    model: Model
    params: Params
    tokenizer: Any
    stop_ids: tuple[int, ...]


class Piece(NamedTuple):
    """Text as it becomes certain. ``drafted``: its last token was the draft's, not the target's."""

    row: int
    text: str
    drafted: bool


@dataclass(frozen=True)
class Generation:
    """One answer.

    ``tokens``: the emitted ids, a stop token at their end included, those that only
    complete a stop string not. ``finish_reason``: "stop", "length" (the limit or the
    context) or "error" (the target's logits were no law: NaN).
    """

    text: str
    tokens: list[int]
    finish_reason: str
    metrics: Metrics


@functools.lru_cache(maxsize=2)
def load(target: str = "smollm2", dtype: str = "auto") -> Target:
    """Load a target: "smollm2", a Hugging Face folder or a GGUF file.

    ``dtype``: "float32", "bfloat16", "float16", or "auto": float32 on CPUs, whose
    one-row bfloat16 products are slow, bfloat16 elsewhere. Raises `JspecError`.
    """
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    folder = smollm2.ensure() if target == "smollm2" else target
    loaded = checkpoint.load(folder, dtype)
    tokenizer = text.load_tokenizer(loaded.path)
    model = loaded.family.make(loaded.config, dtype=jnp.dtype(dtype))
    return Target(model, loaded.params, tokenizer, text.stop_ids(loaded.path, tokenizer))


def generate(
    prompt: text.Prompt | Sequence[text.Prompt],
    *,
    target: str | Target = "smollm2",
    draft: str = "ngram",
    num_speculative_tokens: int = 4,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    raw: bool = False,
    dtype: str = "auto",
    on_piece: Callable[[Piece], None] | None = None,
) -> Any:
    """Write greedily what follows a prompt: the target's own text, in fewer passes.

    Args:
        prompt: a text, a conversation (a list of ``{"role", "content"}``), or a list of
            either, which runs as one ragged batch.
        target: "smollm2", a Hugging Face folder, a GGUF file, or what `load` gave.
        draft: "ngram" (prompt lookup) or "none" (plain decoding).
        num_speculative_tokens: K, drafts a round.
        max_new_tokens: limit for each row; the target's context is another.
        stop: strings that end the text; the text ends before the first of them.
        raw: give the prompt as it is, without the chat template.
        dtype: see `load`; ignored for a loaded target.
        on_piece: called with each `Piece` of text as it comes. With it, or with stop
            strings, the host reads every round; else once in the whole generation.

    Returns:
        A `Generation`, or a list of them for a list of prompts.

    Raises:
        JspecError: for a prompt that is empty or longer than the context, an unknown
            draft, a number that is not positive, a target that cannot be loaded.
    """
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    prompts: Any = [prompt] if single else prompt
    drafter = _drafter(draft, num_speculative_tokens)
    _positive("max_new_tokens", max_new_tokens)
    if not prompts:
        raise JspecError("there is no prompt: the list is empty")
    loaded = load(target, dtype) if isinstance(target, str) else target
    tokens = [text.encode_prompt(loaded.tokenizer, one, raw) for one in prompts]
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    rows = [text.Detokenizer(loaded.tokenizer, stops) for _ in tokens]
    request = _request(loaded, drafter, tokens, max_new_tokens)
    results = _run(request, rows) if on_piece is None and not stops else _stream(request, rows, on_piece)
    return results[0] if single else results


class Request(NamedTuple):
    """A batch ready to run: the compiled loop and its input arrays."""

    target: Target
    decoder: decode.Decoder
    tokens: np.ndarray  # [B, S]
    prompt_length: np.ndarray  # [B]
    limit: np.ndarray  # [B]
    stop: np.ndarray  # [B, Q]

    def init(self, limit: np.ndarray) -> State:
        arrays = (self.tokens, self.prompt_length, limit, self.stop)
        return self.decoder.init(self.target.params, None, *arrays)


def _request(target: Target, drafter: Drafter, prompts: list[list[int]], max_new_tokens: int) -> Request:
    context = target.model.max_length
    length = np.array([len(p) for p in prompts], np.int32)
    if (length >= context).any():
        worst = int(np.argmax(length))
        raise JspecError(f"prompt {worst} has {length[worst]} tokens; the target's context holds {context}")
    limit = np.minimum(length + max_new_tokens, context).astype(np.int32)
    decoder = _decoder(target.model, drafter)
    new_tokens = int((limit - length).max())
    slots = kv.capacity(int(length.max()), new_tokens, decoder.nodes, decoder.chunk, BUCKET)
    tokens = np.zeros((len(prompts), slots), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    stop = np.tile(np.array(target.stop_ids or (-1,), np.int32), (len(prompts), 1))
    return Request(target, decoder, tokens, length, limit, stop)


@functools.lru_cache(maxsize=16)
def _drafter(draft: str, num_speculative_tokens: int) -> Drafter:
    if draft not in DRAFTS:
        raise JspecError(f"unknown draft {draft!r}: choose one of {', '.join(DRAFTS)}")
    _positive("num_speculative_tokens", num_speculative_tokens)
    return DRAFTS[draft](num_speculative_tokens)


@functools.lru_cache(maxsize=16)
def _decoder(model: Model, drafter: Drafter) -> decode.Decoder:
    return decode.make_decoder(model, drafter, greedy, chunk=CHUNK)


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise JspecError(f"{name} = {value!r} should be a whole number of at least 1")


_compiled: set[tuple] = set()


def _start(request: Request, *programs: str) -> tuple[State, float, float]:
    """Compile what this shape has not run yet, then prefill: the state and both times.

    The programs are compiled by running them on rows that have already finished.
    """
    began = time.perf_counter()
    key = (request.decoder, request.tokens.shape, request.stop.shape, programs)
    if key not in _compiled:
        state, params = request.init(request.prompt_length), request.target.params
        if "run" in programs:
            state = request.decoder.run(params, None, state)
        else:
            state, _ = decode.one_round(request.decoder, params, None, state, decode.Clock())
        jax.block_until_ready(state)
        del state
        _compiled.add(key)
    compiled = time.perf_counter()
    state = jax.block_until_ready(request.init(request.limit))
    return state, compiled - began, time.perf_counter() - compiled


def _run(request: Request, rows: list[text.Detokenizer]) -> list[Generation]:
    """The whole generation as one program and one host read."""
    state, compiled, prefilled = _start(request, "run")
    began = time.perf_counter()
    state = request.decoder.run(request.target.params, None, state)
    read = decode.fetch((state.tokens, state.length, state.finish, state.stats))
    seconds = Seconds(compiled, prefilled, time.perf_counter() - began)
    for row, tokens, start, end in zip(rows, read[0], request.prompt_length, read[1], strict=True):
        row.push(tokens[start:end].tolist())
    return _results(request, rows, read, seconds)


def _stream(
    request: Request, rows: list[text.Detokenizer], on_piece: Callable[[Piece], None] | None
) -> list[Generation]:
    """Round by round: text as it comes, and an end at stop strings."""
    clock = decode.Clock()
    state, compiled, prefilled = _start(request, "propose", "advance")
    began = time.perf_counter()
    overshoot: list[tuple[int, int, Info]] = []  # row, tokens of the round that counted, the round
    running = True
    while running:
        state, info = decode.one_round(request.decoder, request.target.params, None, state, clock)
        ended = [r.stopped or _push(r, index, info, on_piece, overshoot) for index, r in enumerate(rows)]
        codes = np.where(ended, STOP, info.finish)
        running = bool((codes == RUNNING).any())
        if (codes != info.finish).any():
            state = state._replace(finish=jnp.asarray(codes))
    tokens, length, finish, read = decode.fetch((state.tokens, state.length, state.finish, state.stats))
    seconds = Seconds(compiled, prefilled, time.perf_counter() - began, clock.draft, clock.verify)
    stats = jax.tree.map(np.array, read)
    for index, counted, info in overshoot:  # nothing is counted after a stop string
        stats.proposed[index, counted : info.proposed[index]] -= 1
        stats.accepted[index, counted : info.accepted[index]] -= 1
    return _results(request, rows, (tokens, length, finish, stats), seconds, on_piece)


def _push(
    row: text.Detokenizer,
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
    request: Request,
    rows: list[text.Detokenizer],
    read: tuple,
    seconds: Seconds,
    on_piece: Callable[[Piece], None] | None = None,
) -> list[Generation]:
    tokens, length, finish, stats = read
    texts, emitted = [], []
    for index, row in enumerate(rows):
        rest = row.finish()
        if rest and on_piece:
            on_piece(Piece(index, rest, False))
        start = request.prompt_length[index]
        end = start + row.tokens_used if row.stopped else length[index]
        emitted.append(tokens[index, start:end].tolist())
        texts.append(row.text)
    metrics = summarize(stats, request.prompt_length.tolist(), [len(e) for e in emitted], seconds)
    reasons = [FINISH_REASONS[STOP if r.stopped else int(f)] for r, f in zip(rows, finish, strict=True)]
    return [Generation(*row) for row in zip(texts, emitted, reasons, metrics, strict=True)]
