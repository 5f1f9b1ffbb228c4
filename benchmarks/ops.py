"""Where a round spends its time, operation by operation: ``python benchmarks/ops.py --draft ngram``.

XLA's CPU profile of the compiled loop, summed over operations of the same kind and shapes,
greedy on SmolLM2-135M in float32, one row. For each kind: how often a round runs it, its
least and its median time, and both times the count, in ms a round. The least is what it
costs on a quiet machine, even if this one is not; concurrent operations count twice. Look
here for copies, transposes, and what is neither a product nor attention.
"""

from __future__ import annotations

import argparse
import collections
import glob
import re
import statistics
import tempfile

import jax
import jax.numpy as jnp

import jspec
from jspec.sampling import policy
from jspec.sampling.drafters.config import DraftConfig
from jspec.serve.draft import load_draft
from jspec.serve.generate import lay_out
from jspec.types import State

PROMPT = "Write a long story about a dog that finds a golden key in the garden of an old castle."
CALLS = ("while", "call", "conditional")  # their time is that of what they call


def kinds(program: str) -> dict[str, str]:
    """The name of each operation of a compiled program -> its kind and shapes."""
    pattern = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\S+) ([a-z\-]+)\((.*)$", re.M)
    found = {name: (shape, kind, rest) for name, shape, kind, rest in pattern.findall(program)}

    def shape(name: str) -> str:
        return re.sub(r"\{.*", "", found[name][0]) if name in found else "?"

    result = {}
    for name, (_, kind, rest) in found.items():
        if kind not in CALLS:
            inputs = re.findall(r"%([^\s,)]+)", rest.split("), ")[0])[:3]
            base = re.sub(r"[.\d]+$", "", name)
            result[name] = f"{base} {' '.join(map(shape, inputs))} -> {shape(name)}"
    return result


def durations(run) -> dict[str, list[float]]:
    """Name of an operation -> ms of each time that it ran while ``run()`` was profiled."""
    result = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(file).planes:
            for line in plane.lines:
                for event in line.events:
                    result[event.name].append(event.duration_ns / 1e6)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", default="none", help="as in `jspec bench`")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--top", type=int, default=25)
    options = parser.parse_args()
    target = jspec.load("smollm2", "float32")
    found = load_draft(target, DraftConfig(options.draft, options.num_speculative_tokens))
    decoder, draft_params = found.decoder(), found.params
    rows, key = policy.greedy(1, target.model.vocab_size), [0]
    prompt = target.tokenizer(PROMPT)["input_ids"]
    request = lay_out(target, decoder, [prompt], rows, options.tokens, key, options.slots)
    request = request._replace(stop_token_ids=jnp.full((1, 1), -1))

    def start() -> State:
        return jax.block_until_ready(decoder.init(target.params, draft_params, request))

    program = decoder.run.lower(target.params, draft_params, start()).compile().as_text()
    rounds = int(decoder.run(target.params, draft_params, start()).stats.rounds[0])
    states = [start() for _ in range(options.runs)]
    times = durations(
        lambda: [jax.block_until_ready(decoder.run(target.params, draft_params, state)) for state in states]
    )
    groups: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
    for name, kind in kinds(program).items():
        if name in times:
            count = len(times[name]) / rounds / options.runs
            groups[kind].append((count, count * min(times[name]), count * statistics.median(times[name])))
    sums = {kind: [sum(column) for column in zip(*group, strict=True)] for kind, group in groups.items()}
    least, middle = (sum(s[i] for s in sums.values()) for i in (1, 2))
    print(f"{options.draft}, {rounds} rounds: {least:.2f} ms a round if all ran as fast as they can,")
    print(f"{middle:.2f} by the medians\n\n| least | median | a round | operation |\n|---|---|---|---|")
    for kind, (count, low, median) in sorted(sums.items(), key=lambda item: -item[1][1])[: options.top]:
        print(f"| {low:.3f} | {median:.3f} | {count:.1f} | `{kind}` |")


if __name__ == "__main__":
    main()
