"""Plain decoding against a hand-written loop, transformers and llama.cpp: ``python benchmarks/plain.py``.

The same float32 weights (SmolLM2-135M) and the same prompt, greedy, one row, one process,
two threads each. The engines write in turn, jspec between any two of them, so that a
machine that slows down slows both; a ratio is the median over the turns of an engine's
time over the mean of jspec's on its two sides. Prefill is not timed. First the texts are
compared: token ids have to be equal, or the row says where they part.

The optional engines: ``pip install torch transformers llama-cpp-python gguf``. One that is
missing is left out. Engines that wait for each other's threads in a busy loop, as
llama.cpp's and torch's do, are several times slower beside any other work: a load average
of more than about 0.3 before the start spoils the comparison, so it is printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import tempfile
import time
from pathlib import Path

import engines as others
import handwritten
import jax
import jax.numpy as jnp
import numpy as np
from engines import Write

import jspec
from jspec.decode import make_decoder
from jspec.sampling import policy
from jspec.sampling.drafters.none import none
from jspec.serve.generate import lay_out
from jspec.weights.load import load_checkpoint

PROMPT = "Write a long story about a dog that finds a golden key in the garden of an old castle."


def jspec_engine(target, prompt: list[int], new: int) -> Write:
    decoder = make_decoder(target.model, none())
    rows, key = policy.greedy(1, target.model.vocab_size), [0]
    request = lay_out(target, decoder, [prompt], rows, new, key)
    request = request._replace(stop_token_ids=jnp.full((1, 1), -1))

    def write():
        state = jax.block_until_ready(decoder.init(target.params, None, request))
        began = time.perf_counter()
        state = jax.block_until_ready(decoder.run(target.params, None, state))
        return state.tokens[0, len(prompt) : len(prompt) + new].tolist(), time.perf_counter() - began

    return write


def handwritten_engine(config, params, prompt: list[int], new: int, slots: int) -> Write:
    run = handwritten.make(config)

    def write():
        state = handwritten.start(config, prompt, slots)
        state = jax.block_until_ready(run(params, state, len(prompt), len(prompt) - 1))
        began = time.perf_counter()
        state = jax.block_until_ready(run(params, state, len(prompt), len(prompt) + new - 1))
        return state.tokens[len(prompt) : len(prompt) + new].tolist(), time.perf_counter() - began

    return write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="of torch and llama.cpp; XLA takes all cores")
    parser.add_argument(
        "--layouts",
        default="qkv+gate_up+head",
        help="of the hand-written loop, for instance qkv,head,qkv+head",
    )
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before each engine")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    target = jspec.load("smollm2", "float32")
    config = target.checkpoint.config
    apart = load_checkpoint(target.checkpoint.path, "float32").params  # q, k and v as files have them
    prompt = target.tokenizer(PROMPT)["input_ids"]
    slots = 128 * -(-(len(prompt) + options.tokens + 64) // 128)
    common = prompt, options.tokens
    engines = {f"jspec, K = 0 (jax {jax.__version__})": jspec_engine(target, *common)}
    engines["hand-written loop, the same arrays"] = handwritten_engine(config, target.params, *common, slots)
    for layout in options.layouts.split(","):
        fused = handwritten.fuse(apart, layout.split("+"))
        name = f"hand-written loop, {layout.replace('+', ', ')} laid out anew"
        engines[name] = handwritten_engine(config, fused, *common, slots)
    if others.installed("torch"):
        versions = (
            f"{importlib.metadata.version('transformers')}, torch {importlib.metadata.version('torch')}"
        )
        engines[f"transformers {versions}"] = others.transformers_engine(
            target.checkpoint.path, *common, options.threads
        )
    with tempfile.TemporaryDirectory() as folder:
        if others.installed("llama_cpp", "gguf"):
            others.write_gguf(config, apart, file := Path(folder) / "model.gguf")
            version = importlib.metadata.version("llama_cpp_python")
            engines[f"llama.cpp (llama-cpp-python {version})"] = others.llama_cpp_engine(
                file, *common, slots, options.threads
            )
        report(engines, options.turns, options.tokens, options.pause)


def report(engines: dict[str, Write], turns: int, tokens: int, pause: float) -> None:
    """Compare the texts, then time in turn and print a table; the first engine is the one compared."""
    (own, base), *rest = engines.items()
    texts = {name: engine()[0] for name, engine in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    ratios: dict[str, list[float]] = {name: [] for name, _ in rest}

    def timed(name: str, engine: Write) -> float:
        time.sleep(pause)  # thread pools of other engines go on spinning for a while
        times[name].append(engine()[1])
        return times[name][-1]

    for _ in range(turns):
        before = timed(own, base)
        for name, engine in rest:
            seconds, after = timed(name, engine), timed(own, base)
            ratios[name].append(2 * seconds / (before + after))
            before = after
    print(f"\n{tokens} tokens, {turns} turns\n\n| engine | ms a token | jspec is | text |\n|---|---|---|---|")
    for name in engines:
        same = sum(np.cumprod(np.equal(texts[name], texts[own])))
        text = "the same" if same == tokens else f"the same for {same} tokens"
        ratio = f"{statistics.median(ratios[name]):.2f} x as fast" if name in ratios else ""
        middle = statistics.median(times[name]) / tokens * 1e3
        print(f"| {name} | {middle:.1f} (best {min(times[name]) / tokens * 1e3:.1f}) | {ratio} | {text} |")


if __name__ == "__main__":
    main()
