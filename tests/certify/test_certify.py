"""The certificate: nothing to find in the library, and every kind of mistake is found."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.certify import exact, exact_distribution, greedy_text, report
from jspec.certify.tiny import tiny
from jspec.errors import JspecError
from jspec.models import table
from jspec.sampling import verifiers
from jspec.sampling.drafters.draft_model import draft_model
from jspec.sampling.drafters.ngram import ngram
from tests import oracle
from tests.tiny import folder as tiny_folder

PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5]]
gullible = dataclasses.replace(verifiers.token, accept=lambda proposal, probs: jnp.ones(probs.shape[0]))
forgetful = dataclasses.replace(verifiers.token, residual=lambda proposal, probs, node: probs[node])
typical = dataclasses.replace(verifiers.token, name="typical_lossy", lossless=False)


@pytest.fixture
def few_distributions(monkeypatch):
    monkeypatch.setattr(exact, "INSTANCES", {"random": exact.INSTANCES["random"]})


NGRAM = ngram(4, min_ngram=1), None  # one value each, so that a loop is compiled once
TABLE = oracle.random_table(vocab=7, order=1)
TABLE_DRAFT = draft_model(TABLE[0], 3), oracle.random_table(1, vocab=7, order=1)[1]


def test_the_same_program_writes_the_same_bits():
    target = oracle.tiny_llama()
    for same_shape in (False, True):
        found = greedy_text(*target, *NGRAM, PROMPTS, max_new_tokens=30, same_shape=same_shape, batch=2)
        assert found.tokens == 90 and not found.differences and found.same_shape == same_shape
        assert found.accept_length > 1


def test_a_draft_that_is_not_checked_is_a_fault():
    for same_shape in (False, True):
        found = greedy_text(*TABLE, *TABLE_DRAFT, PROMPTS, verifier=gullible, same_shape=same_shape)
        assert found.faults == len(found.differences) == 3
        for difference in found.differences:
            assert difference.margin > 0 and difference.plain != difference.drafted


def test_a_tie_is_no_fault_unless_the_program_is_the_same():
    """After token 0 the target hardly prefers 1 to 2, and the draft takes 2; 2 is followed by 0 as 1 is."""
    nearly = jnp.array([[0.0, 1.0, 1.0 - 1e-5], [2.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    target = table.make(3), nearly
    draft = draft_model(table.make(3), 2, greedy=True), nearly.at[0, 2].set(9.0)
    check = functools.partial(greedy_text, *target, *draft, [[0]], verifier=gullible, max_new_tokens=8)
    found = check()
    (flip,) = found.differences
    assert flip[:4] == (0, 0, 1, 2) and flip.verdict == "tie flip" and found.faults == 0
    assert flip.margin == pytest.approx(1e-5, rel=0.1)
    assert check(same_shape=True).faults == check(tolerance=1e-6).faults == 1


def test_a_stop_token_ends_both_texts():
    text = oracle.greedy_text(*TABLE, [1, 2], 22)
    found = greedy_text(*TABLE, *TABLE_DRAFT, [[1, 2]], max_new_tokens=20, stop_token_ids=text[6:7])
    assert found.tokens == text[2:].index(text[6]) + 1 and not found.differences


def test_exact_distribution_finds_a_verifier_that_is_wrong(few_distributions):
    assert max(found.error for found in exact_distribution(verifiers.block)) < report.EXACT
    wrong = {found.drafts: found.error for found in exact_distribution(forgetful)}
    assert min(wrong.values()) > 0.01
    assert exact_distribution(verifiers.coupled) == []


def test_a_lossy_verifier_is_refused():
    with pytest.raises(JspecError, match="'typical_lossy' is lossy"):
        exact_distribution(typical)
    with pytest.raises(JspecError, match="nothing to certify"):
        greedy_text(*TABLE, *NGRAM, PROMPTS, verifier=typical)
    with pytest.raises(JspecError, match="nothing to certify"):
        jspec.certify.chi_square(*tiny(0), ngram(2), None, typical)


def test_a_target_whose_distribution_cannot_be_enumerated_is_refused():
    with pytest.raises(JspecError, match="32 tokens cannot be enumerated"):
        jspec.certify.chi_square(*oracle.tiny_llama(), ngram(2), None, verifiers.token)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def options(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text('{"prompt": "abc abc abc"}\n{"turns": ["the cat, the"]}\n')
    return ("certify", "--target", folder, "--prompts", path, "--max-new-tokens", 20, "--rows", 300)


@pytest.mark.slow
def test_the_command(jspec, options, few_distributions):
    verifiers_of = ("--verifier", "block", "--verifier", "coupled")
    code, out, _ = jspec(*options, "--draft", "self:1", *verifiers_of)
    assert code == 0 and out.splitlines()[-1] == "certified: no fault found"
    assert "same shape  2 prompts" in out and "tokens equal bit for bit" in out
    assert (
        "exact distribution   block, sampled chain: 17 settings" in out
        and "coupled     0 texts differ" in out
    )


def test_the_command_ends_with_1_at_a_fault(jspec, options, few_distributions, monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "token", gullible)
    code, out, err = jspec(*options, "--draft", "self:1", "--verifier", "token", "--json")
    found = json.loads(out)
    assert code == 1 and "Traceback" not in err and not found["certified"] and found["draft"] == "self:1"
    assert [len(c["p_values"]) for c in found["chi_square"]] == [6]
    faults = found["faults"]
    assert any("greedy text" in f for f in faults) and any("in the same program" in f for f in faults)
    assert any("misses the target" in f for f in faults)
    assert any("writes another distribution: p = 0" in f for f in faults)


def test_the_command_refuses_a_lossy_verifier(jspec, options, monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "token", typical)
    code, out, err = jspec(*options, "--verifier", "token")
    assert code == 1 and out == "" and "is lossy" in err and "Traceback" not in err


def test_half_precision_is_certified_on_its_own_terms(few_distributions):
    """bfloat16: the loop's distribution is that of the same rounded model, and ties are wider."""
    found = jspec.certify.chi_square(
        *tiny(0, "bfloat16"), draft_model(tiny(1, "bfloat16")[0], 3), tiny(1, "bfloat16")[1], verifiers.token,
        rows=1000,
    )  # fmt: skip
    assert min(found.p_values) > 1e-6 and 0 < found.acceptance_rate < 1
    assert np.isfinite(found.p_values).all()
