"""Rollouts for reinforcement learning: samples and their log-probabilities, while the params change.

    python examples/rollouts.py                             # a table of five tokens; seconds
    python examples/rollouts.py --target smollm2 --steps 3  # the same with a real model

One jitted step draws a batch of texts with drafts, scores them once more with teacher forcing, and follows
the gradient of REINFORCE towards more of one token. Params are an argument like any other: after the
first step nothing compiles. The sampled log-probabilities have to be those of teacher forcing; otherwise
the program ends with 1.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jspec
from jspec import tree
from jspec.models import table

Step = Callable[[Any, Array], tuple[Any, Array, Array]]
TOLERANCE = 1e-3  # float32: a pass over K + 1 rows and one over the whole text add in different orders


def teacher_forced(model: jspec.Model, params: Any, text: Array, prompt_length: int) -> Array:
    """Log-probabilities of the tokens after the prompts under the model's own softmax, [B, new tokens]."""
    batch, size = text.shape
    hidden, _, _ = model.forward(params, model.init_cache(batch, size), text, tree.chain(batch, size))
    logp = jax.nn.log_softmax(model.unembed(params, hidden), axis=-1)
    following = jnp.take_along_axis(logp[:, :-1], text[:, 1:, None], axis=2)[:, :, 0]
    return following[:, prompt_length - 1 :]


def make_step(model: jspec.Model, prompts: Array, new_tokens: int, wanted: int, rate: float) -> Step:
    """From params and a key to new params, the mean reward, and how far the log-probabilities are apart."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params: Any, key: Array) -> tuple[Any, Array, Array]:
        samples = jspec.speculative_sample(
            params,
            prompts,
            target=model,
            drafter=jspec.drafters.ngram(4, min_ngram=1),
            key=key,
            max_new_tokens=new_tokens,
            temperature=1.0,
            logprobs=True,
        )
        assert samples.logprobs is not None  # they were asked for
        text = jnp.concatenate([prompts, samples.tokens], axis=1)
        reward = jnp.mean(samples.tokens == wanted, axis=1)
        advantage = reward - jnp.mean(reward)

        def loss(params: Any) -> tuple[Array, Array]:
            logp = teacher_forced(model, params, text, prompts.shape[1])
            return -jnp.mean(advantage * jnp.sum(logp, axis=1)), logp

        gradient, logp = jax.grad(loss, has_aux=True)(params)
        apart = jnp.max(jnp.abs(logp - samples.logprobs.raw))
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
        return params, jnp.mean(reward), apart

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="table", help="table, or what jspec.load takes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    options = parser.parse_args()

    if options.target == "table":
        model, rate = table.make(5), 10.0
        params = 0.1 * jax.random.normal(jax.random.key(1), (6, 5))  # logits after each token
        prompts, wanted = jnp.full((options.batch, 1), 2), 3
    else:
        target = jspec.load(options.target, dtype="float32")
        model, params, rate = target.model, jax.tree.map(jnp.copy, target.params), 1e-3
        prompts = jnp.array([target.tokenizer.encode("the sea and")] * options.batch)
        wanted = target.tokenizer.encode(" the")[0]

    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    step = make_step(model, prompts, options.max_new_tokens, wanted, rate)
    keys = jax.random.split(jax.random.key(0), options.steps)
    worst = 0.0
    for index in range(options.steps):
        params, reward, apart = step(params, keys[index])
        worst = max(worst, float(apart))
        print(f"step {index}: reward {float(reward):.3f}, log-probabilities {float(apart):.1e} apart")
        if index == 0:
            compiled.clear()
    print(f"programs compiled after the first step: {len(compiled)}")
    if worst > TOLERANCE:
        raise SystemExit(f"sampled and teacher-forced log-probabilities are {worst:.1e} apart")


if __name__ == "__main__":
    main()
