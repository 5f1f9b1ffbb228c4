"""Fused verification against the plain walk: the same verdicts for every verifier and draft."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.verify import fused, reference
from jspec.sampling import keys, verifiers, walk
from jspec.sampling.verifiers import lossy
from tests.pallas import verify_cases as cases

VOCAB, NODES = 23, 5
VERIFIERS = {
    verifier.name: verifier
    for verifier in (
        verifiers.greedy,
        verifiers.token,
        verifiers.block,
        verifiers.coupled,
        lossy.typical_lossy,
    )
}


@functools.cache
def compiled(decide, verifier):
    return jax.jit(functools.partial(decide, VERIFIERS[verifier]), static_argnames="depth")


DECIDE = fused.make()


def same(one, other) -> None:
    """Equal verdicts on what is emitted: the path, the tokens and their log-probabilities."""
    emitted = np.arange(one.tokens.shape[1]) < np.asarray(one.accepted + one.ok)[:, None]
    for name in ("path", "accepted", "ok"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_array_equal(np.where(emitted, one.tokens, 0), np.where(emitted, other.tokens, 0))
    np.testing.assert_allclose(
        np.where(emitted, one.logprob, 0), np.where(emitted, other.logprob, 0), rtol=1e-4, atol=1e-5
    )


QUICK = {("token", False, True, False), ("token", True, False, True), ("greedy", True, False, False)}
QUICK |= {("coupled", False, False, False), ("token", True, True, False)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(VERIFIERS, (False, True), (False, True), (False, True))
    if not (case[0] == "block" and case[1])  # it judges chains
]


@pytest.mark.parametrize(("verifier", "tree_of", "drawn", "bias"), CASES)
def test_fused_is_the_walk(verifier, tree_of, drawn, bias):
    more = dict(logit_bias={5: 3.0}, repetition_penalty=1.2, min_new_tokens=9) if bias else {}
    rows, history = cases.settings(VOCAB, **more), cases.history(VOCAB)
    accepted = 0
    for seed in range(12):
        proposal = cases.proposal(seed, NODES, VOCAB, tree_of=tree_of, drawn=drawn)
        x = cases.logits(seed, NODES, VOCAB).at[:, :, :3].add(3)
        given = rows, history, cases.row_keys(seed), jnp.arange(cases.BATCH) + seed, proposal, x
        plain, got = (compiled(d, verifier)(*given, depth=NODES - 1) for d in (walk.decide, DECIDE))
        same(plain, got)
        accepted += int(plain.accepted.sum())
    assert accepted > 8


@pytest.mark.parametrize(
    ("verifier", "tree_of"), [("greedy", True), ("token", False), ("token", True), ("coupled", False)]
)
def test_bad_rows_end_the_walk(verifier, tree_of):
    """NaN, +inf and rows of -inf alone; -inf at single tokens is a distribution."""
    bad = np.zeros((cases.BATCH, NODES, VOCAB), np.float32)
    bad[0, 1, 4], bad[1, 0, 2], bad[2, 2], bad[3, 1, 20:] = np.nan, np.inf, -np.inf, -np.inf
    for seed in range(6):
        proposal = cases.proposal(seed, NODES, VOCAB, tree_of=tree_of, drawn=False)
        x = cases.logits(seed, NODES, VOCAB).at[:, :, :3].add(6) + bad
        given = (cases.settings(VOCAB), cases.history(VOCAB), cases.row_keys(seed))
        given += (jnp.arange(cases.BATCH), proposal, x)
        plain, got = (compiled(d, verifier)(*given, depth=NODES - 1) for d in (walk.decide, DECIDE))
        same(plain, got)
        assert not got.ok[1]
        assert bool(jnp.all(got.ok[3:]))


def test_a_draft_without_a_distribution_is_a_point_mass():
    proposal = cases.proposal(1, NODES, VOCAB, tree_of=False, drawn=True)
    proposal = proposal._replace(logq=proposal.logq.at[:, 2, 7].set(jnp.nan).at[:, 3, :].set(-jnp.inf))
    x = cases.logits(1, NODES, VOCAB).at[:, :, :3].add(4)
    given = (
        cases.settings(VOCAB),
        cases.history(VOCAB),
        cases.row_keys(1),
        jnp.arange(cases.BATCH),
        proposal,
        x,
    )
    for verifier in ("token", "block"):
        same(*(compiled(d, verifier)(*given, depth=NODES - 1) for d in (walk.decide, DECIDE)))


def test_the_noise_of_a_draw_is_that_of_jax():
    """Whatever draws, the words are threefry's for (key, token id)."""
    rows, x = cases.settings(VOCAB), cases.logits(0, NODES, VOCAB)
    stats = reference.row_stats_ref(rows, x)
    node = jnp.arange(cases.BATCH) % NODES
    nothing = jnp.full((cases.BATCH, 1), -1)
    last = reference.LastDraw(node, cases.row_keys(3), nothing, nothing[:, 0], jnp.zeros(cases.BATCH))
    token, logp = reference.gumbel_argmax_ref(rows, x, stats, last)
    table = reference.log_probs(rows, stats, x)[jnp.arange(cases.BATCH), node]
    for row in range(cases.BATCH):
        noise = jax.random.gumbel(keys.wrap(last.key)[row], (VOCAB,), mode="high")
        assert token[row] == jnp.argmax(table[row] + noise)
        assert logp[row] == table[row, token[row]]
