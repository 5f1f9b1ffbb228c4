"""Numbers that are none stay where they are: a bad token that is only drafted, only padding, or stale
harms no row that may not see it; one that a row does see ends it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, tree
from jspec.cache import dense
from jspec.models import llama
from jspec.sampling.drafters import draft_model
from jspec.sampling.verifiers import token
from jspec.types import ERROR, LENGTH, Drafter, Proposal
from tests import oracle
from tests.sampling.drafters.cases import BY_CASE, TRANSFORMERS

BAD = 31  # never written: it is banned
PROMPTS, SLOTS, NEW = [[3], [4, 9, 2] * 4, list(range(1, 8))], 128, 24


def poisoned(params, value, ids=(BAD,)):
    return params | {"embed": params["embed"].at[jnp.array(ids)].set(value)}


def request(model, **settings):
    limits = [len(prompt) + NEW for prompt in PROMPTS]
    return oracle.request(model, PROMPTS, SLOTS, limits, **({"banned": [0, BAD]} | settings))


def write(model, params, drafter, draft_params=None, chunk=8, **settings):
    decoder = decode.make_decoder(model, drafter, token, chunk=chunk)
    state = decoder.init(params, draft_params, request(model, **settings))
    return decoder.run(params, draft_params, state)


def plain(model, params, **settings):
    return oracle.texts(write(model, params, BY_CASE["none"].build(), **settings))


def spoiled(text, every: int):
    """Right drafts, but for the bad token in every so-many-th place."""
    script = np.zeros((len(text), SLOTS), np.int32)
    for row, right in zip(script, text, strict=True):
        row[: len(right)] = right
    script[:, ::every] = BAD
    return script


def in_trees(drafter):
    """The chain as a tree whose root has the bad token as another, first child."""

    def propose(params, state, root, context):
        chain, state = drafter.propose(params, state, root, context)
        tokens = jnp.insert(chain.tokens, 1, BAD, axis=1)
        nodes = tokens.shape[1]
        parent = jnp.array([-1, 0, 0, *range(2, nodes - 1)])
        layout = tree.from_parents(jnp.broadcast_to(parent, tokens.shape))
        return Proposal(tokens, layout, chain.count + 1), state

    return Drafter(**{**drafter.__dict__, "propose": propose, "nodes": drafter.nodes + 1, "growth": "tree"})


@pytest.mark.parametrize(
    ("world", "growth", "value"),
    [
        ("llama", "chain", jnp.nan),
        pytest.param("llama", "tree", jnp.inf, marks=pytest.mark.quick),
        ("windowed", "chain", jnp.inf),
        pytest.param("windowed", "tree", jnp.nan, marks=pytest.mark.slow),
        pytest.param("llama", "chain", -3e38, marks=pytest.mark.slow),
    ],
)
def test_a_bad_token_that_is_only_drafted(world, growth, value):
    """Also in rings, whose stale slots hold it for rounds."""
    model, params = oracle.TINY[world]()
    bad = poisoned(params, value)
    right = plain(model, params)
    drafter = oracle.scripted(spoiled(right, every=3), 4)
    state = write(model, bad, in_trees(drafter) if growth == "tree" else drafter)
    assert oracle.texts(state) == right and set(state.finish.tolist()) == {LENGTH}
    assert (state.stats.accepted.sum(1) > 0).all()


@pytest.mark.parametrize(
    ("world", "chunk"),
    [("llama", 8), ("windowed", 64), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("llama", 4), ("llama", 64), ("windowed", 4), ("windowed", 8)))],
)  # fmt: skip
def test_a_bad_token_that_is_only_padding(world, chunk):
    """Prompts are padded with token 0, in every chunk that they do not fill."""
    model, params = oracle.TINY[world]()
    state = write(model, poisoned(params, jnp.nan, [0, BAD]), BY_CASE["none"].build(), chunk=chunk)
    assert oracle.texts(state) == plain(model, params) and set(state.finish.tolist()) == {LENGTH}


@pytest.mark.parametrize("name", ["model", pytest.param("eagle_chain", marks=pytest.mark.slow)])
def test_a_drafter_with_a_cache_of_its_own(name):
    """Its padding is bad too: it goes on drafting what it drafted before."""
    rig = BY_CASE[name].rig(TRANSFORMERS["llama"])
    healthy = write(rig.target, rig.params, rig.drafter, rig.draft_params)
    state = write(
        rig.target, poisoned(rig.params, jnp.nan, [0]), rig.drafter, poisoned(rig.draft_params, jnp.nan, [0])
    )
    assert oracle.texts(state) == oracle.texts(healthy)
    assert state.stats.accepted.tolist() == healthy.stats.accepted.tolist()


def test_values_that_float16_cannot_hold():
    """The bad token's values overflow when they are written."""
    params = jax.tree.map(lambda x: x.astype(jnp.float16), oracle.tiny_llama()[1])
    model = llama.make(oracle.CONFIG, dtype=jnp.float16)
    right = plain(model, params)
    bad = poisoned(params, 6e4)
    bad["layers"] = [
        layer | {"attn_norm": layer["attn_norm"].astype(jnp.float32) * 1.0} for layer in bad["layers"]
    ]
    state = write(model, bad, oracle.scripted(spoiled(right, every=3), 4))
    assert oracle.texts(state) == right
    keys, values = jnp.ones((1, 1, 1, 4)), jnp.array([1.0, 7e4, -7e4, 2.0]).reshape(1, 1, 1, 4)
    hidden_keys, kept = dense.hide_bad_values(keys, values, jnp.float16)
    assert np.isnan(hidden_keys).all() and kept.ravel().tolist() == [0, 0, 0, 0]


def test_a_bad_token_in_the_text_ends_its_row_and_no_other():
    model, params = oracle.tiny_llama()
    bad = poisoned(params, jnp.nan, [9])  # in the second prompt
    state = write(model, bad, BY_CASE["ngram"].build(), banned=[0, 9, BAD])
    assert state.finish.tolist() == [LENGTH, ERROR, LENGTH]
    assert int(state.length[1]) == len(PROMPTS[1])


def test_without_the_cure_rows_are_lost(monkeypatch):
    """Mutant: values are written as they are."""
    monkeypatch.setattr(dense, "hide_bad_values", lambda keys, values, dtype: (keys, values))
    model, params = oracle.tiny_llama()
    drafter = draft_model(model, 3)  # any drafter: the padding is bad
    decoder = decode.make_decoder(llama.make.__wrapped__(oracle.CONFIG), drafter, token, chunk=8)
    bad = poisoned(params, jnp.nan, [0])
    state = decoder.run(bad, params, decoder.init(bad, params, request(model)))
    assert ERROR in state.finish.tolist()
