"""What a tree costs beyond its model passes: ``python benchmarks/trees.py``.

SmolLM2-135M, float32, one row, N = 32 nodes. The head is an EAGLE-1 head of the target's
hidden size with random weights: its passes cost what a trained one's do. So that the walk goes
down, the tokens of each node's first child are overwritten by the text that the target
writes at temperature 0.

A round of the loop is timed beside its model passes in a program of their own: the head
takes in the emitted tokens and runs each level of the tree, the target runs N rows, all
with their logits. The rest (growth, policy, verify, walk, compaction, bookkeeping) is the
share that the loop adds. Medians over the turns, passes timed on both sides of a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec import tree
from jspec.models.decoder import FINAL
from jspec.models.heads import Head, eagle1
from jspec.models.layers import random_params
from jspec.sampling import keys
from jspec.sampling.drafters import eagle_dynamic, eagle_static
from jspec.sampling.drafters.none import none
from jspec.types import Drafter, Tree

PROMPT = "Write a long story about a dog that finds a golden key in the garden of an old castle."
ROUNDS, NODES, DEPTH, TOPK = 8, 32, 5, 8
SETTINGS = {"0": {}, "1": dict(temperature=1.0), "1, top-p 0.9": dict(temperature=1.0, top_p=0.9)}


def random_head(target: Any) -> tuple[Head, Any]:
    """An EAGLE-1 head for a tied target."""
    settings = dataclasses.replace(target.checkpoint.config, layers=1, windows=())
    config = eagle1.Config(settings, fc_bias=False)
    params = random_params(eagle1.weights(config, ["layers.0"]), scale=0.02)
    return eagle1.make(config), {**params, "embed": target.params["embed"], "rows": target.params["embed"]}


def told(drafter: Drafter, text: Any) -> Drafter:
    """The drafter with the first child of each node on the first path taken from a text."""

    def propose(params, state, root, context):
        proposal, state = drafter.propose(params, state, root, context)
        tokens, at = proposal.tokens, jnp.zeros_like(root)
        logq = proposal.logq
        for depth in range(1, drafter.depth + 1):
            child = proposal.tree.parent == at[:, None]
            node, row = jnp.argmax(child, axis=1), jnp.arange(len(root))
            right = jnp.where(jnp.any(child, axis=1), text[context.position + depth], tokens[row, node])
            tokens = tokens.at[row, node].set(right)
            logq = None if logq is None else logq.at[row, node].set(-jnp.inf)
            at = node
        return proposal._replace(tokens=tokens.at[:, 0].set(root), logq=logq), state

    return dataclasses.replace(drafter, propose=propose)


def passes(target: Any, model: Any, head: Head, params: Any, levels: list[int], slots: int) -> Callable:
    """Seconds of a round's model passes alone."""
    caches = [model.init_cache(1, slots, NODES), head.init_cache(1, slots + sum(levels), NODES)]
    caches = [cache._replace(length=jnp.full((1,), slots // 2, jnp.int32)) for cache in caches]
    layout = tree.from_parents(jnp.array([[-1] + [i // 2 for i in range(NODES - 1)]]))

    @functools.partial(jax.jit, donate_argnums=2)
    def run(base, params, caches):
        def one(carry, _):
            token, stream, (cache, own) = carry

            def rows(count, token, stream, own, earlier):
                mask = jnp.ones((1, count, earlier + count), bool)
                place = jnp.zeros((1, count), jnp.int32)
                tokens = jnp.broadcast_to(token[:, None], (1, count))
                streams = jnp.broadcast_to(stream, (1, count, head.hidden_size))
                hidden, stream, own = head.forward(params, own, tokens, streams, Tree(place, place, mask))
                return hidden, stream[:, :1], own

            hidden, stream, own = rows(DEPTH + 1, token, stream, own, 0)
            token, earlier = keys.best(head.unembed(params, hidden[:, :1]))[:, 0], 0
            for count in levels:
                hidden, stream, own = rows(count, token, stream, own, earlier)
                token, earlier = keys.best(head.unembed(params, hidden))[:, 0], earlier + count
            tokens = jnp.broadcast_to(token[:, None], (1, NODES))
            hidden, _, cache = model.forward(base, cache, tokens, layout)
            token = keys.best(model.unembed(base, hidden))[:, 0]
            return (token, stream, (cache, own)), None

        start = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1, head.hidden_size)), tuple(caches)
        return jax.lax.scan(one, start, None, length=ROUNDS)[0]

    def program() -> float:
        nonlocal caches
        began = time.perf_counter()
        *_, caches = jax.block_until_ready(run(target.params, params, caches))
        return (time.perf_counter() - began) / ROUNDS

    return program


def of_the_prompt(target: Any, decoder: jspec.Decoder, slots: int, temperature: float = 0.0, **sampling: Any):
    """A request for 100 tokens; no token ends it."""
    prompt, sampling = target.tokenizer(PROMPT)["input_ids"], {"temperature": temperature, **sampling}
    return jspec.make_request(decoder, [prompt], key=[1], max_new_tokens=100, min_slots=slots, **sampling)


def loop(target: Any, model: Any, drafter: Drafter, params: Any, slots: int, settings: dict) -> Callable:
    """Seconds of a round, and tokens that it writes."""
    decoder = jspec.make_decoder(model, drafter)
    request = of_the_prompt(target, decoder, slots, **settings)

    def program() -> tuple[float, float]:
        state = jax.block_until_ready(decoder.init(target.params, params, request))
        began = time.perf_counter()
        for _ in range(ROUNDS):
            state, _ = decoder.step(target.params, params, state)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
        return seconds / ROUNDS, float(state.length[0] - state.prompt_length[0]) / ROUNDS

    return program


def continuation(target: Any, slots: int) -> Any:
    """The prompt and what the target writes after it at temperature 0."""
    decoder = jspec.make_decoder(target.model, none())
    request = of_the_prompt(target, decoder, slots)
    return decoder.run(target.params, None, decoder.init(target.params, None, request)).tokens[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--only", default="", help="only trees whose name has this")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, jax {jax.__version__}")
    target = jspec.load("smollm2", "float32")
    model = target.checkpoint.family.make(target.checkpoint.config, feature_layers=(FINAL,))
    head, params = random_head(target)
    text, vocab = continuation(target, options.slots), model.vocab_size
    shape = tree.likeliest(NODES - 1, DEPTH, TOPK)
    inner = [len(shape.inner(level)) for level in range(1, shape.depth)]
    trees = {
        "static, best": (eagle_static(head, shape, vocab_size=vocab, drawn=False), inner),
        "static, drawn": (eagle_static(head, shape, vocab_size=vocab), inner),
        "dynamic": (
            eagle_dynamic(head, size=NODES - 1, depth=DEPTH, topk=TOPK, vocab_size=vocab),
            [TOPK] * (DEPTH - 1),
        ),
    }
    print("\n| tree | temperature | tokens a round | ms a round | ms of its passes | the loop's share |")
    print("|---|---|---|---|---|---|")
    chosen = {name: made for name, made in trees.items() if options.only in name}
    for name, (drafter, levels) in chosen.items():
        alone = passes(target, model, head, params, levels, options.slots)
        for kind, settings in SETTINGS.items():
            whole = loop(target, model, told(drafter, text), params, options.slots, settings)
            alone(), whole()  # compile
            figures, before = [], alone()
            for _ in range(options.turns):
                (seconds, tokens), after = whole(), alone()
                figures.append(
                    (tokens, seconds * 1e3, (before + after) * 500, 1 - (before + after) / 2 / seconds)
                )
                before = after
            tokens, milliseconds, model_ms, share = np.median(np.array(figures), axis=0)
            print(
                f"| {name} | {kind} | {tokens:.2f} | {milliseconds:.1f} | {model_ms:.1f} | {share:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
