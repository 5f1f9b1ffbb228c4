"""The target distribution the slow and obvious way, by sorting, one text at a time; and cases."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.types import History

B, N, S, V = 4, 5, 16, 37
NEUTRAL = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0)
NEUTRAL |= dict(frequency_penalty=0.0, min_new_tokens=0, logit_bias=None, allowed=None, banned=())


def slow(options: dict, words: np.ndarray, prompt_length: int, stop: np.ndarray, logits: np.ndarray):
    """The distribution after one text, by sorting, in float64: the obvious way."""
    o = NEUTRAL | options
    x = logits.astype(np.float64)
    for token, bias in (o["logit_bias"] or {}).items():
        x[token] += bias
    x[list(o["banned"])] = -np.inf
    if o["allowed"] is not None:
        x[[token for token in range(len(x)) if token not in o["allowed"]]] = -np.inf
    for token in set(words):
        x[token] = x[token] * o["repetition_penalty"] if x[token] < 0 else x[token] / o["repetition_penalty"]
    generated = list(words[prompt_length:])
    for token in set(generated):
        x[token] -= o["frequency_penalty"] * generated.count(token) + o["presence_penalty"]
    if len(generated) < o["min_new_tokens"]:
        x[stop[stop >= 0]] = -np.inf
    if not np.isfinite(x.max()):
        return np.full_like(x, np.nan)
    if o["temperature"] == 0:
        return np.where(np.arange(len(x)) == np.argmax(x), 0.0, -np.inf)
    x /= o["temperature"]
    if o["top_k"] > 0:
        x[x < sorted(x)[-min(o["top_k"], len(x))]] = -np.inf
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    if o["top_p"] < 1:
        above = np.array([p[p > p[token]].sum() for token in range(len(p))])
        p[above >= o["top_p"]] = 0
    p[p < o["min_p"] * p.max()] = 0
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum())


def random_options(random: np.random.Generator) -> dict:
    """Each setting is on with an even chance."""
    options = dict(
        temperature=random.choice([0.0, 0.5, 1.6]),
        top_k=int(random.integers(1, 25)),
        top_p=random.uniform(0.1, 0.99),
        min_p=random.uniform(0, 0.4),
        repetition_penalty=random.uniform(0.5, 2),
        presence_penalty=random.uniform(-2, 2),
        frequency_penalty=random.uniform(-1, 1),
        min_new_tokens=int(random.integers(0, 8)),
        logit_bias={int(token): random.normal() for token in random.integers(0, V, 4)},
        allowed=random.integers(0, V, 20).tolist(),
        banned=random.integers(0, V, 3).tolist(),
    )
    return {name: value for name, value in options.items() if random.random() < 0.5}


def rows(options: list[dict]) -> dict:
    """The settings of several rows as `make` takes them."""
    return {name: [(NEUTRAL | row)[name] for row in options] for name in NEUTRAL}


def random_case(seed: int, shape: str):
    random = np.random.default_rng(seed)
    options = [random_options(random) for _ in range(B)]
    prompt_length = random.integers(1, 6, B)
    length = prompt_length + random.integers(0, 6, B)
    tokens = random.integers(0, 12, (B, S))
    nodes = random.integers(0, 12, (B, N))
    nodes[:, 0] = tokens[np.arange(B), length - 1]
    tokens[np.arange(S) >= length[:, None]] = random.choice([-1, 5, V, 10**6])  # means nothing
    stop = random.integers(-1, 6, (B, 3))
    history = History(*(x.astype(np.int32) for x in (tokens, length, prompt_length, stop)))
    parent = np.array([[random.integers(0, i) if i else -1 for i in range(N)] for _ in range(B)])
    layout = tree.chain(B, N) if shape == "chain" else tree.from_parents(jnp.asarray(parent))
    logits = 2 * random.standard_normal((B, N, V))
    logits[:, :, -3:] = -np.inf
    return options, history, nodes.astype(np.int32), layout, logits


def expected(options, history, nodes, layout, logits):
    probs = np.zeros(logits.shape)
    for row in range(B):
        for node in range(N):
            above, at = [], node
            while at > 0:
                above.insert(0, nodes[row, at])
                at = int(layout.parent[row, at])
            words = np.concatenate([history.tokens[row, : history.length[row]], above]).astype(int)
            prompt = int(history.prompt_length[row])
            probs[row, node] = slow(
                options[row], words, prompt, history.stop_token_ids[row], logits[row, node]
            )
    return probs
