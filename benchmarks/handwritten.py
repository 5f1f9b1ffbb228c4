"""The least that greedy decoding of a Llama needs, written without jspec: the baseline of `plain.py`.

One row, one token a pass, one `lax.while_loop`; a pass is straight jnp over one array a
weight. What is known to be fast on a CPU is in it: a KV cache written by a scatter of two
rows (XLA copies the cache for one), a maximum by blocks in place of `jnp.argmax`, no batch
axis, rope once a pass. `fuse` gives the weights the layout that is fastest for one row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    """``tokens[:position + 1]`` are known, ``position`` is the next to be run."""

    tokens: Any  # Int[S]
    position: Any
    cache: Any  # a layer: keys and values, Float[K S C]


def start(config: Any, prompt: list[int], slots: int) -> State:
    """A state that has run nothing yet."""
    tokens = jnp.zeros((slots,), jnp.int32).at[: len(prompt)].set(jnp.array(prompt))
    shape = (config.kv_heads, slots, config.head_dim)
    cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.layers)]
    return State(tokens, jnp.int32(0), cache)


LAYOUTS = "qkv", "gate_up", "head"


def fuse(params: Any, layout: Collection[str] = LAYOUTS) -> Any:
    """The same weights; of the layout: q, k, v as one matrix, gate and up as one, the head as [D, V]."""

    def layer(p):
        joined = {n: parts for n, parts in PARTS.items() if n in layout and parts[0] in p}
        wide = {name: jnp.concatenate([p[part] for part in parts], axis=1) for name, parts in joined.items()}
        gone = {part for parts in joined.values() for part in parts}
        return wide | {name: w for name, w in p.items() if name not in gone}

    params = {**params, "layers": [layer(p) for p in params["layers"]]}
    if "head" in layout and "head" not in params:
        params["head"] = params["embed"].T.copy()
    return params


PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def norm(x, weight, eps):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x)) + eps) * weight


def best(logits, block=128):
    """The first of the greatest, by blocks."""
    if logits.shape[0] % block:
        return jnp.argmax(logits)
    blocks = logits.reshape(-1, block)
    row = jnp.argmax(jnp.max(blocks, axis=1))
    return row * block + jnp.argmax(blocks[row])


def one_pass(config: Any, params: Any, cache: Any, token: Any, position: Any):
    """Logits after ``token``, which stands at ``position``, and the cache with it."""
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    group, eps = heads // kv_heads, config.norm_eps
    angle = position * config.rope.theta ** -(jnp.arange(0, head_dim, 2) / head_dim)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    seen = jnp.arange(cache[0][0].shape[1]) <= position

    def rotate(x):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def put(buffer, row):
        return buffer.at[:, position + jnp.arange(2)].set(
            jnp.stack([row, row], axis=1), mode="drop", unique_indices=True, indices_are_sorted=True
        )

    x = params["embed"][token]
    new = []
    for p, (keys, values) in zip(params["layers"], cache, strict=True):
        y = norm(x, p["attn_norm"], eps)
        if "qkv" in p:
            q, k, v = jnp.split(y @ p["qkv"], [heads * head_dim, (heads + kv_heads) * head_dim])
        else:
            q, k, v = y @ p["q"], y @ p["k"], y @ p["v"]
        keys = put(keys, rotate(k.reshape(kv_heads, head_dim)))
        values = put(values, v.reshape(kv_heads, head_dim))
        scores = jnp.einsum("kgc,ksc->kgs", rotate(q.reshape(kv_heads, group, head_dim)), keys)
        weights = jax.nn.softmax(jnp.where(seen, scores * head_dim**-0.5, -jnp.inf))
        x = x + jnp.einsum("kgs,ksc->kgc", weights, values).reshape(-1) @ p["o"]
        y = norm(x, p["mlp_norm"], eps)
        gate, up = jnp.split(y @ p["gate_up"], 2) if "gate_up" in p else (y @ p["gate"], y @ p["up"])
        x = x + (jax.nn.silu(gate) * up) @ p["down"]
        new.append((keys, values))
    x = norm(x, params["norm"], eps)
    return x @ params["head"] if "head" in params else params["embed"] @ x, new


def make(config: Any):
    """``run(params, state, prompt_length, end) -> state``: passes until the position is ``end``."""

    def run(params, state: State, prompt_length, end):
        def body(state):
            logits, cache = one_pass(
                config, params, state.cache, state.tokens[state.position], state.position
            )
            after = state.position + 1
            token = jnp.where(after < prompt_length, state.tokens[after], best(logits))
            return State(state.tokens.at[after].set(token.astype(jnp.int32)), after, cache)

        return jax.lax.while_loop(lambda state: state.position < end, body, state)

    return jax.jit(run, donate_argnums=1)
