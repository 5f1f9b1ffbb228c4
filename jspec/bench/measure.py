"""Measuring speculation honestly: everything interleaved in one process, as ratios.

Each setting (a drafter and its K) writes the same prompts as plain decoding, in turn;
the ratio of a prompt is taken between neighbours in time, so a machine that slows down
slows both. Model passes are timed alone, between the generations, for the prediction

    predicted speed-up = plain passes / (wide rounds * r_{K+1} + narrow rounds + rounds * d)

in units of a one-row target pass. A wide round has a proposal, a narrow one has none; d is
what the drafter costs a round: with a draft model the pass that takes in up to K + 1
tokens and the K - 1 passes of the proposal. **Loop efficiency = measured / predicted**: 1 means that
a round costs its model passes and nothing else. With a draft that always proposes it is
the accept length / (r_{K+1} + the drafter's own passes).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec import tree
from jspec.cache import dense
from jspec.sampling import keys, policy
from jspec.sampling.drafters.config import DraftConfig
from jspec.serve.draft import LoadedDraft, load_draft
from jspec.serve.generate import BUCKET, CHUNK, Job, lay_out
from jspec.serve.stream import fetch
from jspec.serve.target import Target
from jspec.text.tokenizer import Prompt, encode_prompt
from jspec.types import Emitted, Model, Params, Stats


@dataclass
class Result:
    """One setting over all prompts and repeats. Times in seconds, costs in one-row target passes."""

    setting: DraftConfig
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
    draft_cost: float = 0.0  # of a round's drafting
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
        return self.plain_passes / (self.wide * self.row_cost + narrow + self.passes * self.draft_cost)

    def to_dict(self) -> dict[str, Any]:
        """Ratios, spreads and costs as plain values, for JSON."""
        ratio = self.speed_up
        conditional = [
            accepted / before if before else None
            for accepted, before in zip(self.accepted, [self.wide, *self.accepted], strict=False)
        ]
        rates = [a / p if p else None for a, p in zip(self.accepted, self.proposed, strict=True)]
        return {
            "name": self.setting.name,
            **dataclasses.asdict(self.setting),
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
    settings: Sequence[DraftConfig],
    prompts: Sequence[Prompt],
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
    wanted = [DraftConfig("none"), *(s for s in settings if s.draft != "none")]
    is_sampled = sampling.get("temperature", 0.0) > 0
    results = [Result(setting) for setting in wanted]
    drafts = [load_draft(target, setting, is_sampled=is_sampled) for setting in wanted]
    widest = max(CHUNK, *(found.drafter.nodes for found in drafts))
    tokens = [encode_prompt(target.tokenizer, prompt) for prompt in prompts]
    # one program for all prompts, and one cache size for all settings
    slots = dense.capacity(max(map(len, tokens)), max_new_tokens, widest, widest, BUCKET)

    def make_job(found: LoadedDraft, prompt: list[int]) -> Job:
        decoder = found.decoder(verifier, chunk=widest)
        rows = policy.make(batch, target.model.vocab_size, **{"temperature": 0.0, **sampling})
        request = lay_out(target, decoder, [prompt] * batch, rows, max_new_tokens, range(batch), slots)
        return Job(decoder, target.params, found.params, request)

    jobs = [[make_job(found, prompt) for found in drafts] for prompt in tokens]
    for setting, first in zip(wanted, jobs[0], strict=True):
        progress(f"compiling {setting.name}")
        _timed(first)
    progress("compiling model passes")
    costs = Costs(target, drafts, jobs[0], batch)
    for repeat in range(repeats):
        for number, row in enumerate(jobs):
            progress(f"repeat {repeat + 1}/{repeats}, prompt {number + 1}/{len(jobs)}")
            before = _timed(row[0])
            _count(results[0], before, before, before)
            for result, job in zip(results[1:], row[1:], strict=True):
                run, after = _timed(job), _timed(row[0])
                _count(result, run, before, after)  # plain on both sides, so that drift cancels
                before = after
            costs.turn()
    while costs.turns < TURNS:
        costs.turn()
    costs.write(results)
    return results


class Run(NamedTuple):
    """One generation: seconds of its rounds, prefill excluded, and what it wrote."""

    seconds: float
    tokens: int
    stats: Stats


def _timed(job: Job) -> Run:
    state = jax.block_until_ready(job.init(job.request.max_length))
    began = time.perf_counter()
    state = jax.block_until_ready(job.decoder.run(job.params, job.draft_params, state))
    seconds = time.perf_counter() - began
    length, prompt, stats = fetch((state.length, state.prompt_length, state.stats))
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


PASSES = 6  # passes a program, so that starting it weighs little
TURNS = 7  # at least


class Costs:
    """Times model passes alone, a turn between the generations, so that they meet the same machine."""

    def __init__(self, target: Target, drafts: Sequence[LoadedDraft], jobs: list[Job], batch: int):
        """Compile the passes of every height, and each drafter's side of a round."""
        slots = jobs[0].request.tokens.shape[1]
        self.drafts, self.turns = drafts, 0
        heights = sorted({1, *(found.drafter.nodes for found in drafts)})
        self.programs = {rows: passes(target.model, target.params, batch, slots, rows) for rows in heights}
        self.drafting: dict[str, Callable[[], Any]] = {}
        for index, (found, job) in enumerate(zip(drafts, jobs, strict=True)):
            if found.drafter.nodes > 1:
                self.drafting[f"draft {index}"] = _drafting(found, job)
        self.times: dict[Any, list[float]] = {key: [] for key in (*self.programs, *self.drafting)}
        self.turn()
        for values in self.times.values():
            values.clear()  # they hold compiling
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1
        for key, program in (*self.programs.items(), *self.drafting.items()):
            began = time.perf_counter()
            jax.block_until_ready(program())
            self.times[key].append((time.perf_counter() - began) / PASSES)

    def write(self, results: list[Result]) -> None:
        """Put the medians, in one-row target passes, into the results."""
        middle = {key: statistics.median(values) for key, values in self.times.items()}
        for index, (result, found) in enumerate(zip(results, self.drafts, strict=True)):
            if found.drafter.nodes > 1:
                result.row_cost = middle[found.drafter.nodes] / middle[1]
                result.draft_cost = middle[f"draft {index}"] / middle[1]
                if found.params is not None and found.drafter.growth == "chain":
                    result.draft_step = result.draft_cost / found.drafter.depth


def passes(model: Model, params: Params, batch: int, slots: int, rows: int) -> Callable[[], Any]:
    """Target passes of ``rows`` rows, logits included; how full the cache is does not matter."""
    cache = model.init_cache(batch, slots, rows)
    cache = cache._replace(length=jnp.full((batch,), slots // 2, jnp.int32))

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, cache):
        def one(carry, _):
            tokens, cache = carry
            hidden, _, cache = model.forward(params, cache, tokens, tree.chain(batch, rows))
            return (keys.best(model.unembed(params, hidden)), cache), None

        start = jnp.zeros((batch, rows), jnp.int32), cache
        return jax.lax.scan(one, start, None, length=PASSES)[0]

    def program():
        nonlocal cache
        tokens, cache = run(params, cache)
        return tokens

    return program


def _drafting(found: LoadedDraft, job: Job) -> Callable[[], Any]:
    """Rounds of the drafter alone: propose, then take in what a full round would emit."""
    state, drafter = job.init(job.request.max_length), found.drafter
    paths, width = drafter.depth + 1, found.target.model.feature_size

    @functools.partial(jax.jit, donate_argnums=1)
    def run(draft_params, state):
        def one(state, _):
            proposal, state = job.decoder.propose(None, draft_params, state)
            nothing = jnp.zeros_like(state.length)  # scratch only: the length stays where it is
            features = jnp.zeros((len(nothing), paths, width), jnp.float32)
            emitted = Emitted(proposal.tokens[:, :paths], nothing, features)
            return state._replace(draft=drafter.absorb(draft_params, state.draft, emitted)), None

        return jax.lax.scan(one, state, None, length=PASSES)[0]

    def program():
        nonlocal state
        state = run(job.draft_params, state)
        return state.draft

    return program
