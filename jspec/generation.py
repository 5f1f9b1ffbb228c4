"""`generate`: text in, text out, from Python; the `jspec` command is a shell around it.

Targets are loaded once and decoders compiled once for each setting and shape; both are
kept for the next call.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec import cache as kv
from jspec import decode, stream, text
from jspec.drafts import Drafting, find_draft
from jspec.errors import JspecError
from jspec.metrics import Metrics, Seconds, summarize
from jspec.sampling import keys, policy
from jspec.sampling.policy import Policy
from jspec.targets import Target, load, positive
from jspec.types import FINISH_REASONS, RUNNING, STOP, Info, Logprobs, Params, Request, State

CHUNK = 64  # prompt tokens a prefill pass
BUCKET = 128  # cache slots are a multiple of this, so that requests of similar size share a program


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
    logprobs: Logprobs | None = None  # a list of floats for each kind, where asked for


def generate(
    prompt: text.Prompt | Sequence[text.Prompt],
    *,
    target: str | Target = "smollm2",
    draft: str | None = None,
    num_speculative_tokens: int = 4,
    tree: str | None = None,
    tree_size: int | None = None,
    tree_depth: int | None = None,
    tree_topk: int | None = None,
    simulated_acceptance: Sequence[float] = (),
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    raw: bool = False,
    dtype: str = "auto",
    kernels: str = "auto",
    seed: int | Sequence[int | None] | None = None,
    verifier: str = "token",
    logprobs: bool = False,
    on_piece: Callable[[Piece], None] | None = None,
    **sampling: Any,
) -> Any:
    """Write what follows a prompt: text of exactly the target's law, in fewer passes.

    Args:
        prompt: a text, a conversation (a list of ``{"role", "content"}``), or a list of
            either, which runs as one ragged batch.
        target: "smollm2", a Hugging Face folder, a GGUF file, or what `load` gave.
        draft: "ngram" (prompt lookup, the default), "none" (plain decoding), "self:LAYERS"
            (the target's own first layers), the folder of a model with the same tokenizer,
            or the folder of a draft head (EAGLE-1, 2, 3, Medusa; `jspec.heads`).
        num_speculative_tokens: K, drafts a round in a chain.
        tree: how a head's drafts grow: "chain" (default for EAGLE), "static" (default for
            Medusa) or "dynamic" (EAGLE-2: the likeliest nodes first).
        tree_size, tree_depth, tree_topk: drafted nodes, levels, and children a node of a
            tree (default: 25, 5 and 8; 31 nodes if dynamic).
        simulated_acceptance: instead of a draft, to time the loop: drafts at depth 1, 2, ...
            are kept with these chances, whatever they say. **The text is not real.**
        max_new_tokens: limit for each row; the target's context is another.
        stop: strings that end the text; the text ends before the first of them.
        raw: give the prompt as it is, without the chat template.
        dtype, kernels: see `load`; ignored for a loaded target.
        seed: of all rows, or one for each; a row's text depends on no other row's.
            None: a fresh one. Greedy text needs none.
        verifier: "token" (Leviathan et al.), "block" (Sun et al.), "coupled" (the same
            text whatever the draft, up to near ties), or "typical_lossy" (Medusa's typical
            acceptance, which changes the law).
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
    """
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    prompts: Any = [prompt] if single else prompt
    positive("max_new_tokens", max_new_tokens)
    if not prompts:
        raise JspecError("there is no prompt: the list is empty")
    loaded = load(target, dtype, kernels) if isinstance(target, str) else target
    rows, key = _policy(loaded, len(prompts), sampling), _seeds(seed, len(prompts))
    shape = (tree, tree_size, tree_depth, tree_topk, tuple(simulated_acceptance))
    # Greedy rows have no use for a drawn tree, which costs a little more than its best tokens.
    warm = bool((np.asarray(sampling.get("temperature", 0.0)) > 0).any())
    asked = Drafting(draft, num_speculative_tokens, *shape, drawn=warm or tree != "static")
    found = find_draft(loaded, asked)
    decoder = found.decoder(verifier, chunk=CHUNK, logprobs=logprobs)
    tokens = [text.encode_prompt(loaded.tokenizer, one, raw) for one in prompts]
    request = lay_out(loaded, decoder, tokens, rows, max_new_tokens, key)
    job = Job(decoder, loaded.params, found.params, request)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    texts = [text.Detokenizer(loaded.tokenizer, stops) for _ in tokens]
    results = _run(job, texts) if on_piece is None and not stops else _stream(job, texts, on_piece)
    return results[0] if single else results


class Job(NamedTuple):
    """A batch ready to run: the compiled loop, its params and its request."""

    decoder: decode.Decoder
    params: Params
    draft_params: Params
    request: Request

    def init(self, limit: Array) -> State:
        return self.decoder.init(self.params, self.draft_params, self.request._replace(limit=limit))


def lay_out(
    target: Target,
    decoder: decode.Decoder,
    prompts: list[list[int]],
    rows: Policy,
    max_new_tokens: int,
    key: Array,
    slots: int = 0,
) -> Request:
    """A batch of prompts as a `Request`; `JspecError` for one that leaves no room in the context.

    ``slots``: at least so many, where several requests are to share a program.
    """
    context = target.model.max_length
    length = np.array([len(p) for p in prompts], np.int32)
    if (length >= context).any():
        worst = int(np.argmax(length))
        raise JspecError(f"prompt {worst} has {length[worst]} tokens; the target's context holds {context}")
    limit = np.minimum(length + max_new_tokens, context).astype(np.int32)
    new_tokens = int((limit - length).max())
    slots = max(slots, kv.capacity(int(length.max()), new_tokens, decoder.nodes, decoder.chunk, BUCKET))
    tokens = np.zeros((len(prompts), slots), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    stop = np.tile(np.array(target.stop_ids or (-1,), np.int32), (len(prompts), 1))
    arrays = [jnp.asarray(x) for x in (tokens, length, limit, stop)]
    return Request(arrays[0], arrays[1], arrays[2], arrays[3], rows, key)


def _policy(target: Target, batch: int, sampling: dict[str, Any]) -> Policy:
    """The rows of the target law; ids that the tokenizer does not have are never written."""
    rows = policy.make(batch, target.model.vocab_size, **{"temperature": 0.0, **sampling})
    return rows._replace(bias=rows.bias.at[:, len(target.tokenizer) :].set(-jnp.inf))


def _seeds(seed: int | Sequence[int | None] | None, batch: int) -> Array:
    """One key a row: of its own seed, of the seed of all, or of a fresh one."""
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * batch
    return keys.row_keys([secrets.randbits(63) if one is None else one for one in seeds], batch)


_compiled: set[tuple] = set()


def _start(job: Job, streaming: bool) -> tuple[State, float, float]:
    """Compile what this shape has not run yet, then prefill: the state and both times.

    The programs are compiled by running them on rows that have already finished.
    """
    began = time.perf_counter()
    shapes = tuple(x.shape for x in job.request if isinstance(x, jax.Array))
    key = (job.decoder, shapes, streaming)
    if key not in _compiled:
        state = job.init(job.request.length)
        if streaming:
            state, _ = stream.one_round(job.decoder, job.params, job.draft_params, state, stream.Clock())
        else:
            state = job.decoder.run(job.params, job.draft_params, state)
        jax.block_until_ready(state)
        del state
        _compiled.add(key)
    compiled = time.perf_counter()
    state = jax.block_until_ready(job.init(job.request.limit))
    return state, compiled - began, time.perf_counter() - compiled


def _read(state: State) -> tuple:
    return stream.fetch(
        (state.tokens, state.length, state.prompt_length, state.finish, state.stats, state.logprobs)
    )


def _run(job: Job, rows: list[text.Detokenizer]) -> list[Generation]:
    """The whole generation as one program and one host read."""
    state, compiled, prefilled = _start(job, streaming=False)
    began = time.perf_counter()
    read = _read(job.decoder.run(job.params, job.draft_params, state))
    seconds = Seconds(compiled, prefilled, time.perf_counter() - began)
    for row, tokens, end, start in zip(rows, *read[:3], strict=True):
        row.push(tokens[start:end].tolist())
    return _results(rows, read, seconds)


def _stream(
    job: Job, rows: list[text.Detokenizer], on_piece: Callable[[Piece], None] | None
) -> list[Generation]:
    """Round by round: text as it comes, and an end at stop strings."""
    clock = stream.Clock()
    state, compiled, prefilled = _start(job, streaming=True)
    began = time.perf_counter()
    overshoot: list[tuple[int, int, Info]] = []  # row, tokens of the round that counted, the round
    running = True
    while running:
        state, info = stream.one_round(job.decoder, job.params, job.draft_params, state, clock)
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
    rows: list[text.Detokenizer],
    read: tuple,
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
