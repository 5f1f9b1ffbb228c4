"""Sampling with the embedded default on real prompts: the coupled verifier's promise, log-probabilities."""

import numpy as np
import pytest

import jspec
from tests.test_real import ROWS

SAMPLING = dict(temperature=0.8, top_p=0.95, max_new_tokens=32, verifier="coupled")


@pytest.fixture(scope="module")
def target():
    return jspec.load("smollm2", "float32")


@pytest.fixture(scope="module")
def coupled(target):
    """Four prompts with a seed each, decoded plainly under the coupled verifier."""
    prompts = [row["prompt"] for row in ROWS[16:20]]
    results = jspec.generate(prompts, target=target, draft="none", seed=[1, 2, 3, 4], **SAMPLING)
    return prompts, [result.tokens for result in results]


@pytest.mark.parametrize(("draft", "k"), [("ngram", 4), pytest.param("self:10", 2, marks=pytest.mark.slow)])
def test_coupled_text_does_not_depend_on_the_drafter_or_k(target, coupled, draft, k):
    prompts, texts = coupled
    options = dict(target=target, draft=draft, num_speculative_tokens=k, **SAMPLING)
    results = jspec.generate(prompts, seed=[1, 2, 3, 4], **options)
    assert [result.tokens for result in results] == texts
    assert len({tuple(tokens) for tokens in texts}) == 4
    if draft == "self:10":
        assert all(result.metrics.num_draft_tokens > 0 for result in results)


@pytest.mark.slow
def test_coupled_text_does_not_depend_on_the_batch_or_its_order(target, coupled):
    prompts, texts = coupled
    turned = jspec.generate(prompts[::-1], target=target, draft="ngram", seed=[4, 3, 2, 1], **SAMPLING)
    assert [result.tokens for result in turned][::-1] == texts
    alone = jspec.generate(prompts[2], target=target, draft="ngram", seed=3, **SAMPLING)
    assert alone.tokens == texts[2]


@pytest.mark.slow
def test_logprobs_are_those_of_plain_decoding(target, coupled):
    prompts, _ = coupled
    options = dict(target=target, seed=2, logprobs=True, **SAMPLING)
    plain = jspec.generate(prompts[1], draft="none", **options)
    drafted = jspec.generate(prompts[1], draft="self:10", **options)
    assert plain.tokens == drafted.tokens
    for kind in ("processed", "raw"):
        one, other = getattr(plain.logprobs, kind), getattr(drafted.logprobs, kind)
        assert len(one) == len(plain.tokens) and max(one) <= 0.0
        np.testing.assert_allclose(one, other, atol=2e-3)
    assert np.mean(plain.logprobs.processed) > np.mean(plain.logprobs.raw)
