"""Draft ids outside the vocabulary: as if the node were not there, in plain and in fused verification."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.verify import fused
from jspec.sampling import siblings, verifiers, walk
from jspec.sampling.verifiers import lossy
from tests.pallas import verify_cases as cases
from tests.pallas.test_verify import same

VOCAB, NODES = 23, 5
SIMULATED = lossy.simulated_lossy([0.9] * (NODES - 1))
VERIFIERS = [*verifiers.VERIFIERS.values(), SIMULATED]
QUICK = {("token", False, True), ("token", True, False), ("coupled", True, False), ("block", False, True)}
CASES = [
    pytest.param(verifier, *case, marks=() if (verifier.name, *case) in QUICK else pytest.mark.slow)
    for verifier, *case in itertools.product(VERIFIERS, (False, True), (False, True))
    if ("tree" if case[0] else "chain") in verifier.growths
]


def verdicts(verifier, tree_of: bool, drawn: bool, seed: int):
    """Plain and fused, of a draft with such ids; and plain, of one without these nodes."""
    given, meant = cases.with_foreign_ids(
        cases.proposal(seed, NODES, VOCAB, tree_of=tree_of, drawn=drawn), seed, VOCAB
    )
    # An index beyond the row is taken for the last token, and -1 too: so it is a likely one.
    x = cases.logits(seed, NODES, VOCAB).at[:, :, :3].add(5).at[:, :, -1].add(4)
    rows = cases.settings(VOCAB, repetition_penalty=1.2) if seed % 2 else cases.settings(VOCAB)
    before = rows, cases.history(VOCAB), cases.row_keys(seed), jnp.arange(cases.BATCH) + seed
    return (
        program(verifier, plain)(*before, proposal, x)
        for plain, proposal in ((True, given), (False, given), (True, meant))
    )


@functools.cache
def program(verifier, plain: bool):
    decide = walk.decide if plain else fused.make()
    return jax.jit(functools.partial(decide, verifier, depth=NODES - 1))


def check(verifier, tree_of: bool, drawn: bool, seeds=range(10)) -> None:
    accepted = 0
    for seed in seeds:
        plain, got, meant = verdicts(verifier, tree_of, drawn, seed)
        same(meant, plain)
        same(meant, got)
        for verdict in (plain, got):
            assert np.all((verdict.tokens >= 0) & (verdict.tokens < VOCAB))
            assert verdict.accepted[0] == 0
        accepted += int(meant.accepted.sum())
    assert accepted > 4


@pytest.mark.parametrize(
    ("verifier", "tree_of", "drawn"), CASES, ids=lambda x: x.name if hasattr(x, "name") else str(x)
)
def test_a_draft_that_is_no_token_is_absent(verifier, tree_of, drawn):
    check(verifier, tree_of, drawn)


@pytest.mark.parametrize(("tree_of", "drawn"), [(False, False), (True, False)])
def test_ids_that_are_taken_for_the_last_token_are_seen(tree_of, drawn, monkeypatch):
    """The mutant looks them up in the row as they are."""
    monkeypatch.setattr(siblings, "without_foreign_ids", lambda proposal, vocab: proposal)
    program.cache_clear()
    with pytest.raises(AssertionError):
        check(verifiers.token, tree_of, drawn)
    program.cache_clear()
