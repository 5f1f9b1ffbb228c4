"""What each sampling option costs a round on SmolLM2: ``python benchmarks/sampling_options.py``.

One compiled program serves all settings, so they are run in turn in one process, a few
rounds each, many times over; a figure is the median over the turns. Float32, one row,
a scripted draft of K = 4 so that every round verifies five rows.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import jspec
from jspec import tree
from jspec.decode import make_decoder
from jspec.sampling import keys, policy
from jspec.types import Drafter, Proposal, Request

SETTINGS: dict[str, dict] = {
    "greedy": dict(temperature=0.0),
    "temperature 0.8": dict(temperature=0.8),
    "top-k 50": dict(temperature=0.8, top_k=50),
    "top-p 0.9": dict(temperature=0.8, top_p=0.9),
    "min-p 0.05": dict(temperature=0.8, min_p=0.05),
    "top-k 50 and top-p 0.9": dict(temperature=0.8, top_k=50, top_p=0.9),
    "repetition penalty 1.1": dict(temperature=0.8, repetition_penalty=1.1),
    "presence and frequency": dict(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5),
    "logit bias": dict(temperature=0.8, logit_bias={7: 1.0}),
}
SLOTS, PROMPT = 512, [1, 9690, 198, 2683, 359, 253, 5356]


def copying_drafter(k: int) -> Drafter:
    """Proposes the root again and again, at no cost: what is timed is the target's side."""

    def propose(params, state, root, context):
        tokens = jnp.repeat(root[:, None], k + 1, axis=1)
        count = jnp.full(root.shape, k + 1)
        return Proposal(tokens, tree.chain(root.shape[0], k + 1), count), state

    return Drafter(lambda *_: (), lambda *_: (), propose, nodes=k + 1, depth=k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    options = parser.parse_args()
    target = jspec.load("smollm2", "float32")
    drafter = copying_drafter(options.num_speculative_tokens)
    print(f"jax {jax.__version__}, {options.turns} turns of {options.rounds} rounds")
    for verifier in ("token", "block", "coupled"):
        decoder = make_decoder(target.model, drafter, verifier)
        states = {}
        for name, settings in SETTINGS.items():
            rows = policy.make(1, target.model.vocab_size, **settings)
            tokens = jnp.zeros((1, SLOTS), jnp.int32).at[0, : len(PROMPT)].set(jnp.array(PROMPT))
            ends = jnp.array([len(PROMPT)]), jnp.array([SLOTS - 64]), jnp.full((1, 1), -1)
            states[name] = decoder.init(
                target.params, None, Request(tokens, *ends, rows, keys.row_keys([0], 1))
            )
        times: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in range(options.turns + 1):
            for name in SETTINGS:
                began = time.perf_counter()
                for _ in range(options.rounds):
                    states[name], _ = decoder.step(target.params, None, states[name])
                jax.block_until_ready(states[name])
                times[name].append((time.perf_counter() - began) / options.rounds * 1e3)
        base = statistics.median(times["greedy"][1:])
        print(f"\n{verifier}: ms a round, and over greedy")
        for name, values in times.items():
            middle = statistics.median(values[1:])
            print(f"  {name:24s} {middle:7.2f} {middle - base:+7.2f} ({middle / base:.3f} x)")


if __name__ == "__main__":
    main()
