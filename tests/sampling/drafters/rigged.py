"""A target that writes 0, 1, 2, 3, 4, 0, ... and heads that copy it, made by hand; and random heads.

The state at token t is a multiple of the unit vector e_t, and what comes next is known from
one of the things that a head reads: by "token", or by "feature". Nothing else is looked at,
so a head that is given the wrong one is wrong everywhere.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from jspec.models import decoder
from jspec.models.heads import Head, Heads, eagle1, eagle3, medusa
from jspec.models.layers import random_params
from jspec.types import Model, Params
from tests import oracle

VOCAB, WIDTH, GUESSES = 5, 8, 3
CONFIG = decoder.Config(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=WIDTH,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=8,
    context_length=160,
)
FEATURE_LAYERS = {"eagle": (decoder.FINAL,), "eagle3": (0, 1), "medusa": (decoder.FINAL,)}
SAME = jnp.eye(WIDTH)
LONG = WIDTH**0.5  # of a unit vector after a norm


def later(steps: int, columns: int = WIDTH) -> jax.Array:
    """Maps e_t to what stands for the token so many places after t."""
    return jnp.roll(jnp.eye(VOCAB), steps, axis=1) @ jnp.eye(VOCAB, columns)


def padded(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, WIDTH - VOCAB), (0, 0)))


@functools.cache
def target(feature_layers: tuple[int, ...] = ()) -> tuple[Model, Params]:
    params = random_params(decoder.weights(CONFIG), scale=0.0)  # zeros, and norms of 1
    params |= {"embed": SAME[:VOCAB], "head": 9 * padded(later(1, VOCAB))}
    return decoder.make(CONFIG, feature_layers=feature_layers), params


@functools.cache
def eagle(by: str) -> tuple[Head, Params]:
    """``out`` is the state at the next token: from this token's embedding, or from the last one's state."""
    config = eagle1.Config(CONFIG, fc_bias=False)
    params = random_params(eagle1.weights(config, ["layers.0"]), scale=0.0)
    fc = {"token": [LONG * SAME, 0 * SAME], "feature": [0 * SAME, padded(later(1))]}
    params |= {name: target()[1][name] for name in ("embed", "head")} | {"fc": jnp.concatenate(fc[by])}
    return eagle1.make(config), params


@functools.cache
def eagle_3(by: str) -> tuple[Head, Params]:
    """By token: each row's attention sees itself alone. By feature: the MLP turns e_t into e_{t+1}."""
    config = eagle3.Config(CONFIG, VOCAB, FEATURE_LAYERS["eagle3"], WIDTH, norm_before_residual=by == "token")
    params = random_params(eagle3.weights(config, ["midlayer"]), scale=0.0)
    layer = params["layers"][0]
    if by == "token":
        loud = jnp.concatenate([jnp.full((WIDTH, WIDTH), 4.0), 0 * SAME])  # q and k are the same for all
        layer |= {"q": loud, "k": loud, "v": jnp.concatenate([SAME, 0 * SAME]), "o": SAME / LONG}
        layer |= {"hidden_norm": jnp.zeros(WIDTH)}
    else:
        gain = jax.nn.silu(4 * LONG) * LONG
        layer |= {"gate": 4 * SAME, "up": SAME, "down": (padded(later(1)) - SAME) / gain}
        params |= {"fc": jnp.concatenate([SAME, 0 * SAME])}
    return eagle3.make(config), params | {"embed": target()[1]["embed"], "head": target()[1]["head"]}


@functools.cache
def medusa_heads() -> tuple[Heads, Params]:
    config = medusa.Config(WIDTH, VOCAB, GUESSES, blocks=1, bias=False)
    params = random_params(medusa.weights(config, "{i}.{j}.linear", "{i}.1"), scale=0.0)
    heads = [{"head": 9 * padded(later(2 + index, VOCAB))} for index in range(GUESSES)]
    return medusa.make(config), params | {"heads": heads}


def copying(kind: str, by: str = "feature") -> tuple[Head | Heads, Params]:
    """A head that always drafts what `target` writes."""
    return {"eagle": eagle, "eagle3": eagle_3, "medusa": lambda by: medusa_heads()}[kind](by)


@functools.cache
def _random(kind: str) -> tuple[Head | Heads, Params]:
    layer = replace(oracle.CONFIG, layers=1)
    if kind == "eagle":
        first = eagle1.Config(layer)
        return eagle1.make(first), random_params(eagle1.weights(first, ["layers.0"]), 2)
    if kind == "eagle3":
        third = eagle3.Config(layer, 24, FEATURE_LAYERS["eagle3"], layer.hidden_size)
        own = random_params(eagle3.weights(third, ["midlayer"]), 2)
        return eagle3.make(third), own | {"ids": 1 + jnp.arange(24)}
    guesses = medusa.Config(layer.hidden_size, oracle.VOCAB, GUESSES, blocks=1)
    return medusa.make(guesses), random_params(medusa.weights(guesses, "{i}.{j}.linear", "{i}.1"), 2)


def random(kind: str, params: Params) -> tuple[Head | Heads, Params]:
    """A random head for one of the oracle's targets."""
    head, own = _random(kind)
    shared = {"embed": params["embed"]} | ({"head": params["head"]} if kind == "eagle" else {})
    return head, own if kind == "medusa" else own | shared
