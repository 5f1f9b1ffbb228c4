"""Slow, obvious references, and the small models that tests share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.cache import dense
from jspec.models import decoder, llama, table
from jspec.models.layers import random_params
from jspec.models.rope import Rope
from jspec.sampling import keys, policy
from jspec.sampling.walk import verify
from jspec.types import Context, Drafter, Emitted, Model, Proposal, Request

VOCAB = 32
CONFIG = llama.Config(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    context_length=160,
)


@functools.cache
def tiny_llama(
    seed: int = 0, context_length: int = CONFIG.context_length, feature_layers: tuple[int, ...] = ()
) -> tuple[Model, dict]:
    """A transformer small enough to compile in a second, whose texts do not settle at once."""
    config = CONFIG.__class__(**{**CONFIG.__dict__, "context_length": context_length})
    return llama.make(config, feature_layers=feature_layers), random_params(llama.weights(config), seed)


@functools.cache
def tiny_windowed(
    seed: int = 0, context_length: int = CONFIG.context_length, feature_layers: tuple[int, ...] = ()
) -> tuple[Model, dict]:
    """One layer that sees 5 positions and one that sees all: windows shorter than most prompts."""
    changes = dict(context_length=context_length, windows=(5, None), window_rope=Rope(theta=100.0))
    config = CONFIG.__class__(**{**CONFIG.__dict__, **changes})
    return decoder.make(config, feature_layers=feature_layers), random_params(decoder.weights(config), seed)


TINY = {"llama": tiny_llama, "windowed": tiny_windowed}


@functools.cache
def random_table(seed: int = 0, vocab: int = 7, order: int = 2) -> tuple[Model, jax.Array]:
    """A random distribution over the last ``order`` tokens."""
    shape = (vocab + 1,) * order + (vocab,)
    return table.make(vocab, order), jax.random.normal(jax.random.key(seed), shape)


def cycle_table(vocab: int = 5) -> tuple[Model, jax.Array]:
    """Token t is followed by t + 1 mod V: a text of period V."""
    following = (jnp.arange(vocab + 1) + 1) % vocab
    return table.make(vocab, 1), jax.nn.one_hot(following, vocab) * 9.0


@functools.cache
def _score(model: Model, slots: int):
    def last_logits(params, tokens, length):
        hidden, _, _ = model.forward(params, model.init_cache(1, slots), tokens[None], tree.chain(1, slots))
        return model.unembed(params, hidden[:, length - 1][:, None])[0, 0]

    return jax.jit(last_logits)


def greedy_text(model: Model, params, prompt, limit: int, stop=(), slots: int = 256) -> list[int]:
    """Plain greedy decoding without a cache: the whole text is run again for every token."""
    text = list(prompt)
    while len(text) < min(limit, model.context_length):
        padded = jnp.zeros((slots,), jnp.int32).at[: len(text)].set(jnp.asarray(text))
        text.append(int(_score(model, slots)(params, padded, len(text)).argmax()))
        if text[-1] in stop:
            break
    return text


def request(model: Model, prompts, slots: int, limits, stops=(), seeds=None, stop_width: int = 2, **sampling):
    """Ragged prompts as a `Request`; greedy unless settings of the policy are given."""
    tokens = np.zeros((len(prompts), slots), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    stop = np.full((len(prompts), stop_width), -1, np.int32)
    for row, ids in zip(stop, stops, strict=False):
        row[: len(ids)] = ids
    rows = policy.make(len(prompts), model.vocab_size, **{"temperature": 0.0, **sampling})
    key = keys.row_keys(seeds if seeds is not None else range(len(prompts)), len(prompts))
    length = jnp.array([len(p) for p in prompts], jnp.int32)
    limit = jnp.broadcast_to(jnp.asarray(limits, jnp.int32), length.shape)
    return Request(jnp.asarray(tokens), length, limit, jnp.asarray(stop), rows, key)


def texts(state) -> list[list[int]]:
    """Each row's tokens, without what lies beyond its length."""
    lengths = np.asarray(state.length)
    return [row[:n].tolist() for row, n in zip(np.asarray(state.tokens), lengths, strict=True)]


def scripted(script, num_speculative_tokens: int) -> Drafter:
    """A drafter that proposes ``script[row, position + 1 ...]``: perfect, wrong or anything between."""
    script = jnp.asarray(script, jnp.int32)
    nodes = num_speculative_tokens + 1

    def init(params, batch, slots, scratch):
        return ()

    def absorb(params, state, emitted: Emitted):
        return ()

    def propose(params, state, root, context: Context):
        batch = root.shape[0]
        index = context.position[:, None] + 1 + jnp.arange(num_speculative_tokens)
        drafts = jnp.take_along_axis(script, jnp.clip(index, 0, script.shape[1] - 1), axis=1)
        tokens = jnp.concatenate([root[:, None], drafts], axis=1)
        return Proposal(tokens, tree.chain(batch, nodes), jnp.full((batch,), nodes)), ()

    return Drafter(init, absorb, propose, nodes=nodes, depth=num_speculative_tokens)


def assert_cache_is_prefill(model: Model, params, state, window: int = 5) -> None:
    """Every committed entry that a later pass may see equals that of a fresh pass over the text."""
    slots = state.tokens.shape[1]
    batch = state.tokens.shape[0]
    length = np.asarray(state.cache.length)
    empty = model.init_cache(batch, slots)
    _, _, fresh = jax.jit(model.forward)(params, empty, state.tokens, tree.chain(batch, slots))
    if isinstance(fresh, dense.Cache):
        for got, want in zip(jax.tree.leaves(state.cache.layers), jax.tree.leaves(fresh.layers), strict=True):
            # a ring holds the newest entries, of which the next pass sees the last window - 1
            size, seen = got.shape[2], slots if got.shape[2] == slots else window - 1
            for row, n in enumerate(length):
                position = np.arange(max(n - seen, 0), n)
                np.testing.assert_allclose(
                    got[row, :, position % size], want[row, :, position], rtol=1e-4, atol=1e-5
                )
    else:
        for row, n in enumerate(length):
            np.testing.assert_array_equal(state.cache.tokens[row, :n], fresh.tokens[row, :n])


def judge(verifier, key, position, proposal, probs, depth: int):
    """`jspec.sampling.walk.verify` of distributions that are there already, [B, N, V]."""

    def rows(node):
        return probs if node is None else probs[jnp.arange(len(node)), node][:, None]

    return verify(verifier, key, position, proposal, rows, depth)


def next_token(verdict):
    """What follows the last accepted draft."""
    return jnp.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)[:, 0]
