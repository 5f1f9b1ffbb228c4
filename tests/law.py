"""The law of the whole loop: what a batch of many rows wrote, against the enumerated law."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jspec import tree
from jspec.models import llama
from jspec.sampling import policy
from jspec.types import Model, Request
from tests import oracle

VOCAB, LENGTH, SLOTS = 5, 4, 64


@functools.cache
def tiny(seed: int) -> tuple[Model, dict]:
    """A one-layer transformer over five tokens; its law depends on the whole text."""
    config = llama.Config(
        vocab_size=VOCAB, width=16, mlp_width=16, layers=1, heads=2, kv_heads=1, channels=8, max_length=64
    )
    return llama.make(config), oracle.random_params(llama.weights(config), seed, scale=0.5)


# Settings that share one batch: plain sampling, truncations, penalties that see the draft's own
# prefix, a greedy neighbour. Prompts of different lengths.
GROUPS = [
    ([1, 2, 3], dict()),
    ([4], dict(temperature=0.8, top_k=3, min_p=0.02)),
    ([0, 1, 2, 3, 4, 0, 1], dict(temperature=1.4, top_p=0.8)),
    ([2, 2], dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.4)),
    ([3, 3, 1], dict(temperature=0.0)),
    ([3, 0], dict(logit_bias={1: 2.0}, banned=[2], min_new_tokens=2)),
]
STOP = 4  # ends rows of the last group, after two other tokens


def merged(values: list[dict], name: str, default):
    return [value.get(name, default) for value in values]


def request(model: Model, rows: int, first_seed: int = 0) -> tuple[Request, np.ndarray]:
    """``rows`` rows of each group, shuffled together; and which group each row is of."""
    group = np.random.default_rng(0).permutation(np.arange(rows * len(GROUPS)) % len(GROUPS))
    prompts = [GROUPS[g][0] for g in group]
    stops = [(STOP,) if g == len(GROUPS) - 1 else () for g in group]
    seeds = range(first_seed, first_seed + len(group))
    limits = [len(p) + LENGTH for p in prompts]
    asked = oracle.request(model, prompts, SLOTS, limits, stops, seeds)
    one = policy_of_groups()
    return asked._replace(policy=jax.tree.map(lambda x: x[group], one)), group


def policy_of_groups() -> policy.Policy:
    settings = [dict(g[1]) for g in GROUPS]
    neutral = dict(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, min_new_tokens=0, logit_bias=None, banned=(),
    )  # fmt: skip
    return policy.make(len(GROUPS), VOCAB, **{n: merged(settings, n, d) for n, d in neutral.items()})


@jax.jit
def _laws(rows: policy.Policy, asked: Request, length, prompt_length):
    """log p of what follows each text; all texts are of one length and one group."""
    model, params = tiny(0)
    batch = asked.tokens.shape[0]
    cache = model.init_cache(batch, SLOTS)
    hidden, _, _ = model.forward(params, cache, asked.tokens, tree.chain(batch, SLOTS))
    logits = model.unembed(params, hidden[:, length - 1][:, None])
    history = policy.History(
        asked.tokens, jnp.full((batch,), length), jnp.full((batch,), prompt_length), asked.stop
    )
    each = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), rows)
    root = asked.tokens[:, length - 1][:, None]
    return policy.apply(each, history, root, tree.chain(batch, 1), logits)[:, 0]


@functools.cache
def enumerated(group: int) -> dict[tuple[int, ...], float]:
    """The law of the first LENGTH tokens, by running the target over every text."""
    prompt, last, batch = GROUPS[group][0], group == len(GROUPS) - 1, VOCAB ** (LENGTH - 1)
    rows = jax.tree.map(lambda x: x[group : group + 1], policy_of_groups())
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for size in range(LENGTH):
        texts = [t for t in law if len(t) == size and not (last and STOP in t)]
        whole = [prompt + list(t) for t in (texts * batch)[:batch]]
        asked = oracle.request(tiny(0)[0], whole, SLOTS, SLOTS, [(STOP,)] * batch if last else ())
        logp = _laws(rows, asked, len(prompt) + size, len(prompt))
        for text, row in zip(texts, np.exp(np.asarray(logp, np.float64)), strict=False):
            mass = law.pop(text)
            law |= {(*text, token): mass * p for token, p in enumerate(row) if p > 0}
    return law


def p_value(texts: list[list[int]], law: dict[tuple[int, ...], float]) -> float:
    """χ² of the texts against a law; outcomes that are expected fewer than 5 times are put together."""
    seen: dict[tuple[int, ...], int] = dict.fromkeys(law, 0)
    for text in map(tuple, texts):
        if text not in seen:
            return 0.0  # an impossible text
        seen[text] += 1
    expected = np.array(list(law.values())) * len(texts) / sum(law.values())
    counts = np.array(list(seen.values()))
    rare = expected < 5
    pairs = [*zip(counts[~rare], expected[~rare], strict=True)]
    if rare.any():
        pairs.append((counts[rare].sum(), expected[rare].sum()))
    if len(pairs) == 1:
        return 1.0
    found, wanted = zip(*pairs, strict=True)
    return float(stats.chisquare(found, wanted).pvalue)


def p_values(decoder, params, dparams, rows: int, first_seed: int = 0) -> list[float]:
    """One p-value a group, of ``rows`` rows each."""
    asked, group = request(tiny(0)[0], rows, first_seed)
    state = decoder.run(params, dparams, decoder.init(params, dparams, asked))
    written = [t[len(GROUPS[g][0]) :] for t, g in zip(oracle.texts(state), group, strict=True)]
    return [p_value(list(itertools.compress(written, group == g)), enumerated(g)) for g in range(len(GROUPS))]
