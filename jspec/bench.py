"""Measuring speculation honestly: everything interleaved in one process, as ratios.

Each setting (a drafter and its K) writes the same prompts as plain decoding, in turn;
the ratio of a prompt is taken between neighbours in time, so a machine that slows down
slows both. Model passes are timed alone, in the same process, for the prediction

    predicted speed-up = plain passes / (wide rounds * r_{K+1} + narrow rounds + draft time)

in units of a one-row target pass. **Loop efficiency = measured / predicted**: 1 means that
a round costs its model passes and nothing else. With a draft that always proposes it is
the accept length / (r_{K+1} + the drafter's own passes).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec import api, generation, stream, text, tree
from jspec import cache as kv
from jspec.sampling import keys, policy
from jspec.targets import Target, find_draft
from jspec.types import Drafter, Emitted, Model, Params, Stats


@dataclass(frozen=True)
class Setting:
    """What is measured: ``draft`` as `jspec.generate` names it, and K."""

    draft: str
    num_speculative_tokens: int

    @property
    def name(self) -> str:
        return self.draft if self.draft == "none" else f"{self.draft} K={self.num_speculative_tokens}"


@dataclass
class Result:
    """One setting over all prompts and repeats. Times in seconds, costs in one-row target passes."""

    setting: Setting
    ratios: list[float] = field(default_factory=list)  # tokens a second over plain's, one a pair
    tokens_per_second: list[float] = field(default_factory=list)
    seconds: float = 0.0
    plain_seconds: float = 0.0  # what plain decoding would have taken for as many tokens
    tokens: int = 0
    row_passes: int = 0  # target passes, counted in each row
    passes: int = 0  # rounds of the loop, which go on until the last row ends
    plain_passes: int = 0
    wide: int = 0  # rounds that had a proposal
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    row_cost: float = 1.0  # r_{K+1}
    draft_cost: float = 0.0  # of one round that drafts
    draft_step: float | None = None  # c: one pass of a draft model

    @property
    def accept_length(self) -> float:
        return self.tokens / self.row_passes

    @property
    def speed_up(self) -> float:
        """Plain time over this time, all prompts and repeats together."""
        return self.plain_seconds / self.seconds

    @property
    def predicted(self) -> float:
        """The speed-up if a round cost its model passes alone."""
        narrow = self.passes - self.wide
        drafting = self.passes if self.draft_step is not None else self.wide
        return self.plain_passes / (self.wide * self.row_cost + narrow + drafting * self.draft_cost)

    def to_dict(self) -> dict[str, Any]:
        """Ratios, spreads and costs as plain values, for JSON."""
        ratio = self.speed_up
        conditional = [
            accepted / before if before else None
            for accepted, before in zip(self.accepted, [self.wide, *self.accepted], strict=False)
        ]
        rates = [a / p if p else None for a, p in zip(self.accepted, self.proposed, strict=True)]
        return {
            "draft": self.setting.draft,
            "num_speculative_tokens": self.setting.num_speculative_tokens,
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "ratio_to_plain": ratio,
            "ratio_of_pairs": [min(self.ratios), statistics.median(self.ratios), max(self.ratios)],
            "accept_length_bonus_counted": self.accept_length,
            "acceptance_per_position": rates,
            "acceptance_per_position_given_the_one_before": conditional,
            "target_passes": self.passes,
            "passes_with_a_proposal": self.wide,
            "cost_of_k_plus_1_rows": self.row_cost,
            "draft_cost_a_round": self.draft_cost,
            "draft_step_over_target_step": self.draft_step,
            "predicted_speed_up": self.predicted,
            "loop_efficiency": ratio / self.predicted,
            "share_of_no_model_pass": 1 - min(ratio / self.predicted, 1.0),
        }


def bench(
    target: Target,
    settings: Sequence[Setting],
    prompts: Sequence[text.Prompt],
    *,
    max_new_tokens: int = 128,
    batch: int = 1,
    repeats: int = 3,
    verifier: str = "token",
    progress: Callable[[str], None] = lambda line: None,
    **sampling: Any,
) -> list[Result]:
    """Measure each setting against plain decoding on the prompts, ``batch`` copies of each as rows.

    Copies have seeds of their own. Raises `JspecError` as `jspec.generate` does.
    """
    plain = Setting("none", 1)
    wanted = [plain, *(s for s in settings if s.draft != "none")]
    results = [Result(setting) for setting in wanted]
    widest = max(generation.CHUNK, *(setting.num_speculative_tokens + 1 for setting in wanted))
    tokens = [text.encode_prompt(target.tokenizer, prompt) for prompt in prompts]
    # one program for all prompts, and one cache size for all settings
    slots = kv.capacity(max(map(len, tokens)), max_new_tokens, widest, widest, generation.BUCKET)

    def make_job(setting: Setting, prompt: list[int]) -> generation.Job:
        drafter, draft_params = find_draft(
            target, setting.draft, setting.num_speculative_tokens, target.dtype
        )
        decoder = api.decoder(target.model, drafter, verifier, chunk=widest)
        rows = policy.make(batch, target.model.vocab_size, **{"temperature": 0.0, **sampling})
        key = keys.row_keys(range(batch), batch)
        request = generation.lay_out(target, decoder, [prompt] * batch, rows, max_new_tokens, key, slots)
        return generation.Job(decoder, target.params, draft_params, request)

    jobs = [[make_job(setting, prompt) for setting in wanted] for prompt in tokens]
    for setting, first in zip(wanted, jobs[0], strict=True):
        progress(f"compiling {setting.name}")
        _timed(first)
    for repeat in range(repeats):
        for number, row in enumerate(jobs):
            progress(f"repeat {repeat + 1}/{repeats}, prompt {number + 1}/{len(jobs)}")
            before = _timed(row[0])
            _count(results[0], before, before, before)
            for result, job in zip(results[1:], row[1:], strict=True):
                run, after = _timed(job), _timed(row[0])
                _count(result, run, before, after)  # plain on both sides, so that drift cancels
                before = after
    _costs(target, results, jobs[0], batch)
    return results


class Run(NamedTuple):
    """One generation: seconds of its rounds, prefill excluded, and what it wrote."""

    seconds: float
    tokens: int
    stats: Stats


def _timed(job: generation.Job) -> Run:
    state = jax.block_until_ready(job.init(job.request.limit))
    began = time.perf_counter()
    state = jax.block_until_ready(job.decoder.run(job.params, job.draft_params, state))
    seconds = time.perf_counter() - began
    length, prompt, stats = stream.fetch((state.length, state.prompt_length, state.stats))
    return Run(seconds, int((length - prompt).sum()), stats)


def _count(result: Result, run: Run, before: Run, after: Run) -> None:
    plain = (before.tokens + after.tokens) / (before.seconds + after.seconds)
    result.tokens_per_second.append(run.tokens / run.seconds)
    result.ratios.append(run.tokens / run.seconds / plain)
    result.seconds += run.seconds
    result.plain_seconds += run.tokens / plain
    result.tokens += run.tokens
    result.row_passes += int(run.stats.rounds.sum())
    result.passes += int(run.stats.rounds.max())
    result.plain_passes += int(before.stats.rounds.max())
    result.wide += int(run.stats.proposed[:, 0].max()) if run.stats.proposed.size else 0
    for name in ("proposed", "accepted"):
        new = getattr(run.stats, name).sum(axis=0).tolist()
        old = getattr(result, name) or [0] * len(new)
        setattr(result, name, [a + b for a, b in zip(old, new, strict=True)])


def _costs(target: Target, results: list[Result], jobs: list[generation.Job], batch: int) -> None:
    """Time the model passes alone, interleaved, and put them into the results."""
    slots = jobs[0].request.tokens.shape[1]
    heights = sorted({1, *(r.setting.num_speculative_tokens + 1 for r in results)})
    programs = {("target", t): _passes(target.model, target.params, batch, slots, t) for t in heights}
    for index, (result, job) in enumerate(zip(results, jobs, strict=True)):
        if result.setting.draft != "none":
            drafter, _ = find_draft(
                target, result.setting.draft, result.setting.num_speculative_tokens, target.dtype
            )
            programs["draft", index] = _drafting(drafter, job)
    times: dict[Any, list[float]] = {key: [] for key in programs}
    for turn in range(8):
        for key, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program())
            if turn:
                times[key].append((time.perf_counter() - began) / PASSES)
    middle = {key: statistics.median(values) for key, values in times.items()}
    one = middle["target", 1]
    for index, result in enumerate(results):
        if result.setting.draft == "none":
            continue
        result.row_cost = middle["target", result.setting.num_speculative_tokens + 1] / one
        if ("draft", index) in middle:
            result.draft_cost = middle["draft", index] / one
            if result.setting.draft != "ngram":
                result.draft_step = result.draft_cost / result.setting.num_speculative_tokens


PASSES = 6  # passes a program, so that starting it weighs little


def _passes(model: Model, params: Params, batch: int, slots: int, rows: int) -> Callable[[], Any]:
    """Target passes of ``rows`` rows, logits included, over a cache that is half full."""
    cache = model.init_cache(batch, slots, rows)
    cache = cache._replace(length=jnp.full((batch,), slots // 2, jnp.int32))

    @jax.jit
    def run(params, cache):
        def one(carry, _):
            tokens, cache = carry
            hidden, _, cache = model.forward(params, cache, tokens, tree.chain(batch, rows))
            return (keys.best(model.unembed(params, hidden)), cache), None

        start = jnp.zeros((batch, rows), jnp.int32), cache
        return jax.lax.scan(one, start, None, length=PASSES)[0][0]

    return lambda: run(params, cache)


def _drafting(drafter: Drafter, job: generation.Job) -> Callable[[], Any]:
    """Rounds of the drafter alone: propose, then take in what a full round would emit."""
    state = job.init(job.request.limit)

    @jax.jit
    def run(dparams, state):
        def one(state, _):
            proposal, state = job.decoder.propose(None, dparams, state)
            nothing = jnp.zeros_like(state.length)  # scratch only: the length stays where it is
            emitted = Emitted(proposal.tokens, nothing, jnp.zeros((*proposal.tokens.shape, 0)))
            return state._replace(draft=drafter.absorb(dparams, state.draft, emitted)), None

        return jax.lax.scan(one, state, None, length=PASSES)[0].draft

    return lambda: run(job.draft_params, state)
