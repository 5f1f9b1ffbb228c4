"""What a round costs beyond its model passes: ``python benchmarks/round.py``.

SmolLM2-135M, float32, greedy, one row. Two tables, everything in turn in one process:

1. r_T: a pass of T rows over a pass of one row, logits and their argmax included;
2. a perfect draft: the target drafts for itself, so every round keeps all K drafts and
   writes K + 1 tokens. A round of the loop is timed beside the model passes of such a round
   in a program of their own: the draft takes in K + 1 tokens, guesses K - 1 times more,
   and the target runs K + 1 rows. The rest (policy, verify, accept, commit, bookkeeping)
   is the share that the loop adds. So is that of plain decoding, K = 0.

A figure is the median over the turns, a share the median of (round - passes) / round with
the passes timed on both sides of the round.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jspec
from jspec import tree
from jspec.bench.measure import PASSES, passes
from jspec.sampling import keys
from jspec.sampling.drafters.draft_model import draft_model
from jspec.sampling.drafters.none import none
from jspec.types import Model, Params

PROMPT = "Write a long story about a dog that finds a golden key in the garden of an old castle."
ROUNDS = 8  # a program


def passes_of_a_round(model: Model, params: Params, slots: int, k: int) -> Callable[[], float]:
    """Seconds of a round's model passes alone, in the shapes of the loop."""
    caches = [model.init_cache(1, slots, k + 1) for _ in range(2 if k else 1)]
    caches = [cache._replace(length=jnp.full((1,), slots // 2, jnp.int32)) for cache in caches]

    def run_rows(params, cache, tokens, last_only):
        hidden, _, cache = model.forward(params, cache, tokens, tree.chain(*tokens.shape))
        logits = model.unembed(params, hidden[:, -1:] if last_only else hidden)
        return keys.best(logits).astype(jnp.int32), cache

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, caches):
        def one(carry, _):
            tokens, caches = carry
            *draft, target = caches
            drafts = []
            if draft:
                token, cache = run_rows(params, draft[0], tokens, last_only=True)

                def guess(carry, _):
                    token, cache = run_rows(params, carry[1], carry[0], last_only=True)
                    return (token, cache), token[:, 0]

                (_, cache), others = jax.lax.scan(guess, (token, cache), None, length=k - 1)
                draft, drafts = [cache], [token, others.swapaxes(0, 1)]
            tokens, target = run_rows(
                params, target, jnp.concatenate([tokens[:, -1:], *drafts], 1), last_only=False
            )
            return (tokens, [*draft, target]), None

        start = jnp.zeros((1, k + 1), jnp.int32), caches
        return jax.lax.scan(one, start, None, length=ROUNDS)[0]

    def program() -> float:
        nonlocal caches
        began = time.perf_counter()
        tokens, caches = jax.block_until_ready(run(params, caches))
        return (time.perf_counter() - began) / ROUNDS

    return program


def round_of_the_loop(
    target, prompt: list[int], slots: int, k: int, verifier: str
) -> Callable[[], tuple[float, float]]:
    """Seconds of a round, and tokens that it writes."""
    drafter = draft_model(target.model, k) if k else none()
    decoder, new = jspec.make_decoder(target.model, drafter, verifier), ROUNDS * (k + 1)
    request = jspec.make_request(
        decoder, [prompt], key=[0], max_new_tokens=new, min_slots=slots, temperature=0.0
    )

    def program() -> tuple[float, float]:
        state = jax.block_until_ready(decoder.init(target.params, target.params, request))
        began = time.perf_counter()
        state = jax.block_until_ready(decoder.run(target.params, target.params, state))
        seconds, rounds = time.perf_counter() - began, int(state.stats.rounds[0])
        return seconds / rounds, new / rounds

    return program


def heights(target, slots: int, rows: list[int], turns: int) -> None:
    """The table of r_T."""
    programs = {t: passes(target.model, target.params, 1, slots, t) for t in rows}
    times: dict[int, list[float]] = {t: [] for t in rows}
    for _ in range(turns + 1):
        for t, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program())
            times[t].append((time.perf_counter() - began) / PASSES * 1e3)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target.params))
    print(f"\n| rows | ms a pass | best | r_T | GB/s of weights |\n|{'---|' * 5}")
    one = statistics.median(times[rows[0]][1:])
    for t in rows:
        middle = statistics.median(times[t][1:])
        speed = weights / middle / 1e6
        print(f"| {t} | {middle:.1f} | {min(times[t][1:]):.1f} | {middle / one:.2f} | {speed:.1f} |")


def shares(target, slots: int, ks: list[int], turns: int, verifier: str) -> None:
    """The table of what the loop adds."""
    prompt = target.tokenizer(PROMPT)["input_ids"]
    print(f"\n| K | tokens a round | ms a round | ms of its passes | the loop's share |\n|{'---|' * 5}")
    for k in ks:
        alone = passes_of_a_round(target.model, target.params, slots, k)
        whole = round_of_the_loop(target, prompt, slots, k, verifier)
        alone(), whole()  # compile
        rounds, model_ms, share, before = [], [], [], alone()
        for _ in range(turns):
            (seconds, tokens), after = whole(), alone()
            rounds.append(seconds * 1e3)
            model_ms.append((before + after) / 2 * 1e3)
            share.append(1 - model_ms[-1] / rounds[-1])
            before = after
        times = f"{statistics.median(rounds):.1f} | {statistics.median(model_ms):.1f}"
        print(f"| {k} | {tokens:.2f} | {times} | {statistics.median(share):.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--rows", default="1,2,3,5,9,17")
    parser.add_argument(
        "--num-speculative-tokens", default="0,2,4,8", metavar="K,K", help="0: plain decoding"
    )
    parser.add_argument("--verifier", default="token")
    parser.add_argument("--slots", type=int, default=256)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, jax {jax.__version__}")
    target = jspec.load("smollm2", "float32")
    heights(target, options.slots, [int(t) for t in options.rows.split(",")], options.turns)
    ks = [int(k) for k in options.num_speculative_tokens.split(",")]
    shares(target, options.slots, ks, options.turns, options.verifier)


if __name__ == "__main__":
    main()
