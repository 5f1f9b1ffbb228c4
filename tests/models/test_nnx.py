"""A Flax NNX module as a `Model`: both forms write its own text and see its own trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, tree
from jspec.errors import JspecError
from jspec.models.nnx import from_nnx
from jspec.sampling import verifiers
from jspec.sampling.drafters.draft_model import draft_model
from jspec.sampling.drafters.ngram import ngram
from tests import oracle

nnx = pytest.importorskip("flax.nnx")

VOCAB, PLACES, WIDTH, HEADS = 24, 40, 16, 2
SHAPE = dict(vocab_size=VOCAB, context_length=PLACES)


class Layer(nnx.Module):
    """Attention and MLP. The cache has one index for all rows, as in Flax's Gemma."""

    def __init__(self, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, mask, cache):
        heads = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        query, key, value = (heads[:, :, i] for i in range(3))
        if cache is not None:
            at = (0, cache["end"][0], 0, 0)
            key = jax.lax.dynamic_update_slice(cache["k"], key, at)
            value = jax.lax.dynamic_update_slice(cache["v"], value, at)
            cache = {"k": key, "v": value, "end": cache["end"] + x.shape[1]}
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
        x = x + self.out(self.dropout(mixed.reshape(x.shape)))
        return x + self.mlp(jnp.tanh(x)), cache


class Transformer(nnx.Module):
    """Learned positions: `nnx.Embed` gives NaN for one that it does not have."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        wide = jax.nn.initializers.normal(1.0)
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, embedding_init=wide)
        self.places = nnx.Embed(PLACES, WIDTH, rngs=rngs, embedding_init=wide)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, tokens, positions, mask, cache=None):
        self.calls[...] += 1
        x, kept = self.embed(tokens) + self.places(positions), []
        for index, layer in enumerate(self.layers):
            x, entry = layer(x, mask, None if cache is None else cache[index])
            kept.append(entry)
        return (self.embed.attend(x), kept) if cache is not None else self.embed.attend(x)

    def init_cache(self, batch, slots):
        empty = jnp.zeros((batch, slots, HEADS, WIDTH // HEADS))
        end = jnp.zeros((batch,), jnp.int32)
        return [{"k": empty, "v": empty, "end": end} for _ in self.layers]


def with_cache(module, tokens, positions, mask, cache, start):
    """What a user writes for a module that keeps its own index."""
    cache = [layer | {"end": jnp.full_like(layer["end"], start)} for layer in cache]
    return module(tokens, positions, mask, cache)


def causal(module, tokens):
    slot = jnp.arange(tokens.shape[1])
    mask = jnp.broadcast_to(slot <= slot[:, None], (tokens.shape[0], slot.size, slot.size))
    return module(tokens, jnp.broadcast_to(slot, tokens.shape), mask)


@functools.cache
def module(seed=0):
    return Transformer(seed)


@functools.cache
def make(form, seed=0):
    options = {
        "text": {},
        "tokens": dict(call=causal, tokens_only=True),
        "cache": dict(call=with_cache, init_cache=module(seed).init_cache),
    }
    return from_nnx(module(seed), **SHAPE, **options[form])


@functools.cache
def plain():
    """The module itself on a whole text, through nothing of ours."""
    graph, state = nnx.split(module())

    @jax.jit
    def logits(tokens):
        copy = nnx.merge(graph, state, copy=True)
        copy.eval()
        return causal(copy, tokens[None])[0]

    def run(text):
        padded = np.zeros(PLACES, np.int32)
        padded[: len(text)] = text
        return np.asarray(logits(padded))[: len(text)]

    return run


def plain_text(prompt, limit):
    text = list(prompt)
    while len(text) < limit:
        text.append(int(plain()(text)[-1].argmax()))
    return text


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]]


@pytest.mark.parametrize(("form", "draft"), [("text", "ngram"), ("cache", "model")])
def test_greedy_text_is_the_modules_own(form, draft):
    """Ragged rows, drafts right and wrong, texts up to the last position that the module has."""
    target, params = make(form)
    if draft == "ngram":
        drafter, draft_params = ngram(3, min_ngram=1), None
    else:
        other, theirs = make("cache", seed=1)
        draft_params = jax.tree.map(
            lambda a, b: 0.8 * a + 0.2 * b if a.dtype == jnp.float32 else a, params, theirs
        )
        drafter = draft_model(other, 3)
    loop = decode.make_decoder(target, drafter, verifiers.greedy, chunk=4)
    request = oracle.request(target, PROMPTS, 64, [99, 30, 25])
    state = loop.run(params, draft_params, loop.init(params, draft_params, request))
    expected = [plain_text(p, limit) for p, limit in zip(PROMPTS, [PLACES, 30, 25], strict=True)]
    assert oracle.texts(state) == expected
    accepted, proposed = int(state.stats.accepted.sum()), int(state.stats.proposed.sum())
    assert 0 < accepted < proposed
    assert module().calls[...] == 0


# Two branches below the root, one of them forked; node 5 is unused.
PARENT = np.array([-1, 0, 0, 1, 1, -1, 2])
NODES = np.array([11, 4, 9, 13, 17, 0, 21])


@functools.cache
def whole_tree():
    return jax.jit(tree.from_parents)(jnp.tile(jnp.asarray(PARENT), (3, 1)))


@functools.cache
def ragged_prefill(form, slots=24, scratch=8):
    """The prompts but their last tokens, in the cache; `forward` gives logits."""
    target, params = make(form)

    @jax.jit
    def forward(params, cache, tokens, tree):
        hidden, features, cache = target.forward(params, cache, tokens, tree)
        assert features.shape == (*tokens.shape, 0)
        return target.unembed(params, hidden), cache

    commit = jax.jit(target.commit)
    cache = target.init_cache(3, slots, scratch)
    for start in (0, 5):
        tokens = np.zeros((3, 5), np.int32)
        count = np.zeros(3, np.int32)
        for row, prompt in enumerate(PROMPTS):
            piece = prompt[:-1][start : start + 5]
            tokens[row, : len(piece)], count[row] = piece, len(piece)
        _, cache = forward(params, cache, jnp.asarray(tokens), tree.chain(3, 5))
        cache = commit(cache, None, jnp.asarray(count))
    return params, cache, forward, commit


def path_of(node):
    return [*path_of(PARENT[node]), node] if PARENT[node] >= 0 else [node]


@pytest.mark.parametrize("form", ["text", "cache"])
def test_a_tree_and_its_commit(form):
    """Every node has the logits of its own path as a text; so has what follows a committed path."""
    params, cache, forward, commit = ragged_prefill(form)
    logits, cache = forward(params, cache, jnp.tile(NODES, (3, 1)), whole_tree())
    assert logits.shape == (3, 7, VOCAB) and logits.dtype == jnp.float32
    for row, prompt in enumerate(PROMPTS):
        for node in (0, 1, 2, 3, 4, 6):
            expected = plain()(prompt[:-1] + NODES[path_of(node)].tolist())[-1]
            np.testing.assert_allclose(logits[row, node], expected, rtol=1e-4, atol=1e-4)
    path = jnp.array([[0, 1, 4], [0, 2, 6], [0, 1, 0]])
    cache = commit(cache, path, jnp.array([3, 3, 2]))
    assert cache.length.tolist() == [11, 3, 12]
    logits, _ = forward(params, cache, jnp.array([[5], [6], [7]]), tree.chain(3, 1))
    kept = [[11, 4, 17, 5], [11, 9, 21, 6], [11, 4, 7]]
    for row, (prompt, text) in enumerate(zip(PROMPTS, kept, strict=True)):
        expected = plain()(prompt[:-1] + text)[-1]
        np.testing.assert_allclose(logits[row, 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["text", "cache"])
def test_a_tree_in_two_passes(form):
    """The second pass sees the rows that the first one left in the scratch."""
    params, cache, forward, _ = ragged_prefill(form)
    whole, nodes = whole_tree(), jnp.tile(NODES, (3, 1))
    at_once, _ = forward(params, cache, nodes, whole)
    for first in (3, 5):
        head = tree.Tree(whole.parent[:, :first], whole.depth[:, :first], whole.mask[:, :first, :first])
        tail = tree.Tree(whole.parent[:, first:], whole.depth[:, first:], whole.mask[:, first:])
        one, between = forward(params, cache, nodes[:, :first], head)
        two, _ = forward(params, between, nodes[:, first:], tail)
        used = [0, 1, 2, 3, 4, 6]
        both = np.concatenate([one, two], axis=1)
        np.testing.assert_allclose(both[:, used], np.asarray(at_once)[:, used], rtol=1e-4, atol=1e-4)


def test_tokens_alone_are_enough_for_chains():
    params, cache, forward, _ = ragged_prefill("tokens")
    logits, _ = forward(params, cache, jnp.array([[5, 6]] * 3), tree.chain(3, 2))
    for row, prompt in enumerate(PROMPTS):
        expected = plain()([*prompt[:-1], 5, 6])[-2:]
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(JspecError, match="takes tokens only cannot run over a tree"):
        forward(params, cache, jnp.tile(NODES, (3, 1)), whole_tree())


def test_params_are_the_modules_state_and_an_argument():
    """Other weights go through the same compiled program, and nothing is baked in."""
    params, cache, forward, _ = ragged_prefill("text")
    assert params["embed"]["embedding"] is not module().embed.embedding
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(module()))
    tokens = jnp.array([[5, 6]] * 3)
    assert jax.make_jaxpr(forward)(params, cache, tokens, tree.chain(3, 2)).consts == []
    one, other = (forward(p, cache, tokens, tree.chain(3, 2))[0] for p in (params, nnx.state(module(1))))
    assert np.abs(one - other).max() > 0.1


def test_a_head_apart_and_padded_logits():
    """`unembed` may stand apart; ids beyond V are cut off."""
    head = dict(call=lambda m, tokens, *rest: m.embed(tokens), unembed=lambda m, x: m.embed.attend(x))
    target, params = from_nnx(module(), vocab_size=20, context_length=PLACES, **head)
    hidden = jnp.ones((1, 2, WIDTH))
    table = np.asarray(params["embed"]["embedding"])
    expected = np.ones((1, 2, WIDTH)) @ table[:20].T
    np.testing.assert_allclose(jax.jit(target.unembed)(params, hidden), expected, rtol=1e-5, atol=1e-5)
    cache, tokens = target.init_cache(1, 4), jnp.array([[2, 3]])
    hidden, _, _ = jax.jit(target.forward)(params, cache, tokens, tree.chain(1, 2))
    np.testing.assert_array_equal(hidden[0], table[2:4])


def test_slots_on_another_axis():
    """[B, heads, S, C]: what is committed is moved along the slots."""

    def call(module, tokens, positions, mask, cache, start):
        new = jnp.broadcast_to(tokens[:, None, :, None], (tokens.shape[0], 2, tokens.shape[1], 3))
        cache = jax.lax.dynamic_update_slice(cache, new, (0, 0, start, 0))
        return module.embed(tokens), cache

    def init_cache(batch, slots):
        return jnp.zeros((batch, 2, slots, 3), jnp.int32)

    target, params = from_nnx(module(), **SHAPE, call=call, init_cache=init_cache, slot_axis=2)
    cache = target.init_cache(2, 6, 3)
    forward = jax.jit(lambda cache, tokens: target.forward(params, cache, tokens, tree.chain(2, 3))[2])
    commit = jax.jit(target.commit)
    cache = commit(forward(cache, jnp.array([[1, 2, 3], [4, 5, 6]])), None, jnp.array([3, 1]))
    cache = forward(cache, jnp.array([[7, 8, 9], [10, 11, 12]]))
    cache = commit(cache, jnp.array([[0, 2], [0, 2]]), jnp.array([2, 2]))
    assert cache.entries.shape == (2, 2, 9, 3) and cache.length.tolist() == [5, 3]
    assert cache.entries[0, 1, :5, 2].tolist() == [1, 2, 3, 7, 9]
    assert cache.entries[1, 0, :3, 0].tolist() == [4, 10, 12]


def test_what_does_not_fit_is_said():
    cached = dict(call=with_cache, init_cache=module().init_cache)
    with pytest.raises(JspecError, match="tokens_only is for modules without a cache"):
        from_nnx(module(), **SHAPE, **cached, tokens_only=True)
    target, _ = from_nnx(module(), **SHAPE, **cached, slot_axis=2)
    with pytest.raises(JspecError, match=r"init_cache\(1, 12\) gave an array of shape \(1, 12, 2, 8\)"):
        target.init_cache(1, 8, 4)
    cached["call"] = lambda m, tokens, positions, mask, cache, start: (m.embed(tokens), cache[:1])
    target, params = from_nnx(module(), **SHAPE, **cached)
    cache = target.init_cache(1, 8, 4)
    with pytest.raises(JspecError, match="call should give back a cache like the one that it got"):
        target.forward(params, cache, jnp.zeros((1, 2), int), tree.chain(1, 2))
    with pytest.raises(ValueError, match="5 scratch rows do not fit 4 scratch slots"):
        target.forward(params, cache, jnp.zeros((1, 5), int), tree.chain(1, 5))
