"""The target distribution against a slow one that sorts, against transformers, and at its edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.errors import JspecError
from jspec.sampling import distribution, policy
from jspec.sampling.policy import make
from jspec.types import History
from tests.sampling.make_golden_policy import CASES, GOLDEN, PROMPT, STEPS, STOP
from tests.sampling.make_golden_policy import make as make_golden
from tests.sampling.slow_policy import B, S, V, expected, random_case, rows

apply = jax.jit(distribution.log_probs)


def assert_distribution(probs, wanted, atol=2e-5):
    """The same tokens are possible, as likely; or both are an error."""
    probs, wanted = np.asarray(probs), np.asarray(wanted)
    error = np.isnan(wanted).all(-1)
    assert (error == ~np.isfinite(probs.max(-1))).all()
    np.testing.assert_array_equal(np.isneginf(probs[~error]), np.isneginf(wanted[~error]))
    np.testing.assert_allclose(probs[~error], wanted[~error], rtol=0, atol=atol)


def text(tokens, prompt_length, stop=-1):
    """A history of one row."""
    padded = np.zeros((1, S), np.int32)
    padded[0, : len(tokens)] = tokens
    return History(padded, *(np.int32([value]) for value in (len(tokens), prompt_length, [stop, -1])))


def one(logits, history=None, **options):
    """The distribution of a single node. Padded, so that one shape is compiled once."""
    padded = np.full((1, 1, 64), -np.inf, np.float32)
    padded[0, 0, : len(logits)] = logits
    history, root = history or text([0], 1), np.zeros((1, 1), np.int32)
    probs = apply(make(1, 64, **options), history, root, tree.chain(1, 1), padded)
    return np.asarray(probs)[0, 0, : len(logits)]


def kept(probs):
    return np.flatnonzero(probs > -np.inf).tolist()


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("seed", range(6))
def test_mixed_rows_equal_the_slow_distribution(seed, shape):
    options, history, nodes, layout, logits = random_case(seed, shape)
    probs = apply(make(B, V, **rows(options)), history, nodes, layout, logits.astype(np.float32))
    assert probs.dtype == jnp.float32
    assert_distribution(probs, expected(options, history, nodes, layout, logits.astype(np.float32)))


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("seed", range(4))
def test_float64_is_exact(seed, shape):
    with jax.enable_x64(True):
        options, history, nodes, layout, logits = random_case(seed + 100, shape)
        probs = apply(make(B, V, **rows(options)), history, nodes, layout, logits)
        assert probs.dtype == jnp.float64
        assert_distribution(probs, expected(options, history, nodes, layout, logits), atol=1e-13)


def test_each_row_equals_its_own_batch_of_one():
    options, history, nodes, layout, logits = random_case(7, "tree")
    logits = logits.astype(np.float32)
    whole = apply(make(B, V, **rows(options)), history, nodes, layout, logits)
    for row in range(B):
        alone = [jax.tree.map(lambda x, i=row: x[i : i + 1], x) for x in (history, nodes, layout, logits)]
        assert_distribution(apply(make(1, V, **options[row]), *alone), whole[row : row + 1], atol=1e-6)


def test_one_trace_serves_all_settings():
    _, *rest = random_case(3, "chain")
    traced = jax.jit(lambda *arguments: distribution.log_probs(*arguments))
    for options in ({}, dict(temperature=0), *(CASES[name] for name in ("filters", "penalties", "all"))):
        jax.block_until_ready(traced(make(B, V, **options), *rest))
    assert traced._cache_size() == 1


@pytest.mark.parametrize("split", ["draft", "text"])
@pytest.mark.parametrize("case", CASES)
def test_distributions_equal_transformers(case, split):
    """The later tokens as a chain below the root, or each as the root of a longer text."""
    with np.load(GOLDEN) as golden:
        tokens, logits, wanted = golden["tokens"], golden["logits"], golden[case]
    batch = len(tokens)
    settings = make(batch, logits.shape[-1], **CASES[case])
    full = [np.full(batch, PROMPT, np.int32), np.tile(np.int32(STOP), (batch, 1))]
    if split == "draft":
        history = History(tokens, np.full(batch, PROMPT, np.int32), *full)
        probs = apply(settings, history, tokens[:, PROMPT - 1 :], tree.chain(batch, STEPS), logits)
        assert_distribution(probs, wanted)
        return
    for step in range(STEPS):
        history = History(tokens, np.full(batch, PROMPT + step, np.int32), *full)
        root = tokens[:, PROMPT + step - 1 : PROMPT + step]
        probs = apply(settings, history, root, tree.chain(batch, 1), logits[:, step : step + 1])
        assert_distribution(probs, wanted[:, step : step + 1])


@pytest.mark.live
def test_live_golden_distributions_equal_transformers(tmp_path):
    make_golden(tmp_path / "policy.npz")
    with np.load(tmp_path / "policy.npz") as new, np.load(GOLDEN) as stored:
        assert new.files == stored.files
        for name in stored.files:
            np.testing.assert_allclose(new[name], stored[name], rtol=1e-5, atol=1e-5)


def test_ties_stay_together():
    logits = [1.0, 3.0, 3.0, 3.0, 0.0]
    assert kept(one(logits, top_k=2)) == [1, 2, 3]
    assert kept(one(logits, top_k=4)) == [0, 1, 2, 3]
    assert kept(one(logits, top_p=0.5)) == [1, 2, 3]
    assert kept(one(logits, min_p=1.0)) == [1, 2, 3]
    assert kept(one(logits, temperature=0)) == [1]
    assert kept(one([0.0, -0.0, -1.0], top_k=1)) == [0, 1]
    assert kept(one([-1.0, -0.0, 0.0], top_p=0.1)) == [1, 2]


@pytest.mark.parametrize("p", [1e-50, 1e-44, 1e-30, 0.3, 0.9999999, 1.0])
def test_top_p_keeps_the_greatest_token(p):
    probs = one([-np.inf, 2.0, -np.inf], top_p=p)
    assert probs.tolist() == [-np.inf, 0.0, -np.inf]
    assert kept(one([1.0, 2.0, 0.0], top_p=p)) == ([1] if p < 0.5 else [0, 1, 2])


def test_top_p_of_one_keeps_what_float32_cannot_count():
    logits = np.linspace(0, -80, 64)
    assert len(kept(one(logits, top_p=1.0))) == 64
    mixed = make(2, 64, top_p=[0.5, 1.0])
    history = History(*(jnp.zeros(s, jnp.int32) for s in ((2, 1), (2,), (2,), (2, 1))))
    probs = apply(mixed, history, jnp.zeros((2, 1), jnp.int32), tree.chain(2, 1), jnp.tile(logits, (2, 1, 1)))
    assert [len(kept(row[0])) for row in probs] == [1, 64]


def test_top_p_counts_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(one(logits, top_p=0.65)) == [0, 1]
    assert kept(one(logits, top_p=0.55, top_k=2)) == [0]  # .4 of .7


def test_top_k_tells_neighbouring_floats_apart_whatever_the_temperature():
    near = np.nextafter(np.float32(1e-3), np.float32(1))
    assert kept(one([50.0, 1e-3, near, -3.0], top_k=2, temperature=7.0)) == [0, 2]


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-8, 3e38])
def test_extreme_temperatures_are_distributions(temperature):
    probs = one([1.0, 30.0, -20.0, -np.inf], temperature=temperature)
    np.testing.assert_allclose(
        np.exp(probs), [0, 1, 0, 0] if temperature < 1 else [*[1 / 3] * 3, 0], rtol=1e-6
    )


def test_bfloat16_logits_give_a_float32_distribution():
    logits = jnp.array([[[1.0, 2.0]]], jnp.bfloat16)
    probs = apply(make(1, 2), text([0], 1), jnp.zeros((1, 1), jnp.int32), tree.chain(1, 1), logits)
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs[0, 0], jax.nn.log_softmax(jnp.array([1.0, 2.0])), rtol=1e-6)


OPTIONS = [
    {},
    dict(temperature=0.0),
    dict(temperature=0.5, top_k=1),
    dict(top_p=0.3),
    dict(min_p=1.0),
    dict(temperature=0.0, banned=[1]),
    dict(temperature=0.0, allowed=[0]),
    dict(min_new_tokens=5),
    dict(temperature=0.0, min_new_tokens=5),
    dict(top_k=1, top_p=0.2, min_p=0.5, repetition_penalty=1.5, presence_penalty=1, logit_bias={1: 9.0}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("place", range(3))
def test_bad_logits_are_never_hidden(options, place):
    """Whatever masks the bad token: token 1 is banned or a stop token, token 0 in the text."""
    history = text([0], 1, stop=1)
    for bad in (np.nan, -np.float32(np.nan), np.inf):
        logits = np.array([3.0, 1.0, 2.0], np.float32)
        logits[place] = bad
        assert not np.isfinite(jnp.max(one(logits, history, **options)))
    assert not np.isfinite(jnp.max(one([-np.inf] * 3, history, **options)))
    assert np.isfinite(jnp.max(one([3.0, -np.inf, -np.inf], history, **options)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
def test_bad_logits_are_never_hidden_in_long_rows(bad):
    """Where XLA's maximum on CPU overlooks a NaN."""
    logits = np.zeros((3, 1, 49152), np.float32)
    logits[:, :, slice(None) if bad is None else 7] = -np.inf if bad is None else bad
    history = jax.tree.map(lambda x: np.repeat(x, 3, axis=0), text([0], 1))
    settings = make(3, 49152, temperature=[0.0, 1.0, 1.0], top_k=[0, 0, 5])
    probs = apply(settings, history, np.zeros((3, 1), np.int32), tree.chain(3, 1), logits)
    assert not jnp.isfinite(jnp.max(probs, axis=-1)).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_of_one_row_leave_the_others_alone(temperature):
    _, history, nodes, layout, logits = random_case(1, "chain")
    logits = logits.astype(np.float32)
    settings = make(B, V, temperature=[temperature, 0.0, 1.0, 0.7], top_k=[0, 0, 3, 5])
    good = apply(settings, history, nodes, layout, logits)
    logits[0, 2, 5] = np.nan
    probs = apply(settings, history, nodes, layout, logits)
    assert not np.isfinite(jnp.max(probs[0, 2]))
    probs = probs.at[0, 2].set(good[0, 2])
    np.testing.assert_array_equal(probs, good)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_that_alone_is_allowed_and_too_early_is_an_error(temperature):
    options = dict(temperature=temperature, allowed=[2], min_new_tokens=2)
    for length, good in ((4, False), (5, False), (6, True)):  # a prompt of 4: tokens 1 and 2 are too early
        probs = one([1.0, 2.0, 3.0], text([0] * length, 4, stop=2), **options)
        assert np.isfinite(jnp.max(probs)) == good


def test_a_stop_token_comes_after_the_least_number_of_tokens_along_the_draft():
    history, nodes = text([0] * 5, 4, stop=2), jnp.zeros((1, 4), jnp.int32)
    probs = apply(make(1, 5, min_new_tokens=3), history, nodes, tree.chain(1, 4), jnp.zeros((1, 4, 5)))
    assert [kept(row) for row in probs[0]] == [[0, 1, 3, 4]] * 2 + [[0, 1, 2, 3, 4]] * 2  # tokens 2, 3 | 4, 5


def test_a_penalty_sees_the_nodes_own_branch_only():
    parent = jnp.array([[-1, 0, 0, 1]])
    nodes = jnp.array([[0, 1, 2, 3]])
    settings = make(1, 5, presence_penalty=10.0)
    probs = apply(settings, text([0], 1), nodes, tree.from_parents(parent), jnp.zeros((1, 4, 5)))
    assert [np.flatnonzero(row < -9).tolist() for row in probs[0]] == [[], [1], [2], [1, 3]]


def test_per_row_tables():
    settings = make(3, 4, logit_bias=[{1: 2.0}, None, {}], allowed=[None, [1, 2], {3}], banned=[[], (1,), []])
    inf = np.inf
    assert settings.bias.tolist() == [[0, 2, 0, 0], [-inf, -inf, 0, -inf], [-inf, -inf, -inf, 0]]
    assert make(2, 4, banned=np.array([0])).bias.tolist() == [[-inf, 0, 0, 0]] * 2
    assert policy.greedy(2, 4).temperature.tolist() == [0, 0]
    assert make(1, 4, top_k=10**12).top_k.tolist() == [2**31 - 1]


BAD = [
    (dict(temperature=-0.5), r"temperature is -0.5; it must be finite and 0 \(greedy\) or more"),
    (dict(temperature=np.inf), "temperature is inf; it must be finite"),
    (dict(temperature=[1.0, np.nan]), "temperature is nan; it must be finite"),
    (dict(temperature="hot"), "temperature is 'hot'; it must be a number"),
    (dict(temperature=None), "temperature is None; it must be a number"),
    (dict(temperature=[1.0]), r"temperature is \[1.0\]; it must be one number, or one for each of 2 rows"),
    (dict(top_k=-1), r"top_k is -1; it must be an integer, 0 \(off\) or more"),
    (dict(top_k=2.5), "top_k is 2.5; it must be an integer"),
    (dict(top_k=np.inf), "top_k is inf; it must be an integer"),
    (dict(top_p=0), r"top_p is 0; it must be more than 0 and at most 1 \(off\)"),
    (dict(top_p=[0.5, 1.01]), "top_p is 1.01; it must be more than 0 and at most 1"),
    (dict(min_p=-0.1), r"min_p is -0.1; it must be from 0 \(off\) to 1"),
    (dict(min_p=1.5), "min_p is 1.5; it must be from 0"),
    (dict(repetition_penalty=0.0), "repetition_penalty is 0.0; it must be finite and more than 0"),
    (dict(presence_penalty=np.nan), "presence_penalty is nan; it must be finite"),
    (dict(frequency_penalty=-np.inf), "frequency_penalty is -inf; it must be finite"),
    (dict(min_new_tokens=-3), "min_new_tokens is -3; it must be an integer, 0"),
    (
        dict(min_new_tokens=[1, 2, 3]),
        r"min_new_tokens is \[1, 2, 3\]; it must be one number, or one for each",
    ),
    (dict(logit_bias={5: 1.0}), "logit_bias names token 5; it must be an integer from 0 to 4"),
    (dict(logit_bias={"1": 1.0}), "logit_bias names token '1'; it must be an integer from 0 to 4"),
    (dict(logit_bias={1: np.inf}), "logit_bias of token 1 is inf; it must be finite or -inf"),
    (dict(logit_bias={1: np.nan}), "logit_bias of token 1 is nan; it must be finite or -inf"),
    (dict(logit_bias={1: "much"}), "logit_bias of token 1 is 'much'; it must be finite or -inf"),
    (dict(logit_bias=[1, 2]), r"logit_bias is \[1, 2\]; it must hold token ids \(logit_bias: {id: bias}\)"),
    (dict(logit_bias=[{}, {}, {}]), "logit_bias has 3 entries; it must have one for each of 2 rows"),
    (dict(banned=[-1]), "banned names token -1; it must be an integer from 0 to 4"),
    (dict(banned=[1.0]), "banned names token 1.0; it must be an integer"),
    (dict(banned=3), "banned is 3; it must hold token ids"),
    (dict(banned={1: 2.0}), "banned is {1: 2.0}; it must hold token ids"),
    (dict(allowed=[[1], [7]]), "allowed names token 7; it must be an integer from 0 to 4"),
    (dict(allowed=[[1]]), "allowed has 1 entries; it must have one for each of 2 rows"),
    (dict(banned=range(5)), "row 0: logit_bias, allowed and banned mask all 5 tokens"),
    (dict(allowed=[]), "row 0: .* mask all 5 tokens"),
    (dict(allowed=[[1, 2], [3]], banned=[3]), "row 1: .* mask all 5 tokens"),
    (dict(logit_bias=dict.fromkeys(range(5), -np.inf)), "row 0: .* mask all 5 tokens"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_input_is_named(options, message):
    with pytest.raises(JspecError, match=message):
        make(2, 5, **options)
