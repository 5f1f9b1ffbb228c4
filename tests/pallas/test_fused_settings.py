"""A sampling setting that the kernels do not know is not ignored by fused verification: it is plain there."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.verify import fused, reference
from jspec.sampling import distribution, verifiers, walk
from tests.pallas import new_setting
from tests.pallas import verify_cases as cases
from tests.pallas.test_verify import same

VOCAB, NODES = 23, 5
SOME = jnp.array([1, -1, 0, 1, -1, 1])
NONE = jnp.full(cases.BATCH, -1)
GROWTHS = [("token", True), ("block", False), ("coupled", True), ("greedy", False)]
GROWTHS = [("token", False), *(pytest.param(*one, marks=pytest.mark.slow) for one in GROWTHS)]


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, "jspec.pallas.verify.fused")
    return caplog


def round_of(seed: int, tree_of: bool, highest_id: jax.Array):
    proposal = cases.proposal(seed, NODES, VOCAB, tree_of=tree_of, drawn=not tree_of)
    x = cases.logits(seed, NODES, VOCAB).at[:, :, :3].add(3)
    rows = new_setting.extended(cases.settings(VOCAB), highest_id)
    return rows, cases.history(VOCAB), cases.row_keys(seed), jnp.arange(cases.BATCH) + seed, proposal, x


def program(decide, verifier: str):
    """Traced here and now, with the steps that there are."""
    return jax.jit(functools.partial(decide, verifiers.find_verifier(verifier), depth=NODES - 1))


def check(verifier: str, tree_of: bool) -> None:
    """Fused is plain; a greedy row ends at its temperature, before the step."""
    plain, decide = program(walk.decide, verifier), program(fused.make(), verifier)
    for seed in range(6):
        for highest_id in (SOME, NONE):
            given = round_of(seed, tree_of, highest_id)
            expected, got = plain(*given), decide(*given)
            same(expected, got)
            emitted = np.arange(NODES) <= np.asarray(got.accepted)[:, None]
            bound = np.where((highest_id >= 0) & (given[0].temperature > 0), highest_id, VOCAB - 1)
            assert np.all(~emitted | (got.tokens <= bound[:, None]))


@pytest.mark.parametrize(("verifier", "tree_of"), GROWTHS)
def test_a_step_behind_the_temperature_is_plain_code(verifier, tree_of, monkeypatch, told):
    new_setting.install(monkeypatch, after=True)
    check(verifier, tree_of)
    assert "plain in rounds where a row uses highest_id" in told.text


def test_a_step_before_the_temperature_is_applied_before_the_kernels(monkeypatch, told):
    new_setting.install(monkeypatch, after=False)
    plain, decide = program(walk.decide, "token"), program(fused.make(), "token")
    for seed in range(4):
        given = round_of(seed, False, SOME)
        expected, got = plain(*given), decide(*given)
        same(expected, got)
        emitted = np.arange(NODES) <= np.asarray(got.accepted)[:, None]
        bound = np.where(SOME >= 0, SOME, VOCAB - 1)
        assert np.all(~emitted | (got.tokens <= bound[:, None]))
    assert not told.text


@pytest.mark.parametrize(("highest_id", "kernels_draw"), [(NONE, True), (SOME, False)])
def test_where_no_row_uses_it_the_kernels_judge(highest_id, kernels_draw, monkeypatch):
    """Told apart by a draw that is always the same token."""
    new_setting.install(monkeypatch, after=True)

    def always_the_last(policy, x, stats, last, logq):
        return jnp.full(cases.BATCH, VOCAB - 1), jnp.zeros(cases.BATCH)

    given = round_of(1, False, highest_id)
    got = program(fused.make(reference.row_stats_ref, always_the_last), "token")(*given)
    drawn = got.tokens[jnp.arange(cases.BATCH), got.accepted]
    assert bool(jnp.all(drawn == VOCAB - 1)) == kernels_draw
    if not kernels_draw:
        same(program(walk.decide, "token")(*given), got)


def test_a_setting_that_is_ignored_is_seen(monkeypatch):
    """The mutant asks the kernels whatever the rows use."""
    new_setting.install(monkeypatch, after=True)
    monkeypatch.setattr(fused, "or_plain_where_in_use", lambda fields, policy, fused, plain: fused())
    with pytest.raises(AssertionError):
        check("token", False)


def test_a_field_that_only_the_plain_truncation_reads_is_unknown_to_the_kernels(monkeypatch):
    assert fused.unknown_fields() == []
    fields = (*distribution.TEMPERATURE_TO_MIN_P, "typical_p")
    monkeypatch.setattr(distribution, "TEMPERATURE_TO_MIN_P", fields)
    assert fused.unknown_fields() == ["typical_p"]
