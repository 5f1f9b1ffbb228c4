"""The distribution of rows seen piece by piece, in plain jnp with few lanes that keep little: all is used."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jspec.pallas.verify import reference, thresholds
from tests.pallas import verify_cases as cases
from tests.pallas.verify_cases import check_row_stats, hard


@functools.partial(jax.jit, static_argnames=("lanes", "kept_per_lane"))
def row_stats_by_pieces(policy, x, *, lanes: int, kept_per_lane: int) -> tuple[reference.RowStats, jax.Array]:
    """What a kernel would give whose pieces have so many ids, and its number of sweeps."""
    batch, nodes, vocab = x.shape
    pieces = jnp.pad(x, [(0, 0), (0, 0), (0, -vocab % lanes)], constant_values=-jnp.inf)
    pieces = thresholds.clean(pieces).reshape(batch * nodes, -1, lanes).swapaxes(0, 1)

    def fold(visit, start):
        def piece(i, state):
            ids = lax.broadcasted_iota(jnp.int32, pieces.shape[1:], 1) + i * lanes
            return visit(pieces[i], ids, state)

        return lax.fori_loop(0, len(pieces), piece, start)

    rows = thresholds.Rows(
        vocab=vocab,
        bits=8 * x.dtype.itemsize,
        shape=pieces.shape[1:],
        fold=fold,
        together=lambda vectors: jnp.concatenate(vectors, axis=1),
        total=lambda vector: jnp.sum(vector, axis=1, keepdims=True),
        highest=lambda vector: jnp.max(vector, axis=1, keepdims=True),
        lowest=lambda vector: jnp.min(vector, axis=1, keepdims=True),
        any=jnp.any,
        single=lambda convert, number: convert(number),
    )
    own = thresholds.limits(policy, vocab)
    own = thresholds.Limits(*(jnp.repeat(part, nodes)[:, None] for part in own))
    stats, sweeps = thresholds.row_stats(rows, own, own.cut, kept_per_lane)
    return reference.RowStats(*(part.reshape(batch, nodes) for part in stats)), sweeps


SHAPES = [(vocab, *lanes) for vocab in (1, 5, 300, 1000) for lanes in ((8, 1), (8, 3), (128, 4))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab", "lanes", "kept_per_lane"), SHAPES)
def test_distributions(vocab, lanes, kept_per_lane, dtype):
    policy, x = cases.settings(vocab), hard(vocab, 3, vocab, dtype)
    stats, sweeps = row_stats_by_pieces(policy, x, lanes=lanes, kept_per_lane=kept_per_lane)
    check_row_stats(policy, x, stats, reference.row_stats_ref(policy, x))
    assert sweeps > 1 or vocab < 300 or lanes == 128


@pytest.mark.parametrize(
    "setting", [dict(top_k=9), dict(top_p=0.9), dict(top_k=200, top_p=0.5), dict(min_p=0.3)]
)
@pytest.mark.parametrize("few", [True, False])
def test_sweeps(setting, few):
    """One, but where what is kept of the row is more than what the lanes keep."""
    draw = np.random.default_rng(0)
    spread = -4 if few else -0.01
    x = spread * np.log(1 + np.stack([draw.permutation(1000) for _ in range(cases.BATCH)]))
    policy = cases.settings(1000)._replace(
        temperature=jnp.ones(cases.BATCH), top_k=jnp.zeros(cases.BATCH, int)
    )
    policy = policy._replace(top_p=jnp.ones(cases.BATCH), min_p=jnp.zeros(cases.BATCH))
    policy = policy._replace(**{name: jnp.full(cases.BATCH, value) for name, value in setting.items()})
    x = jnp.asarray(x[:, None], jnp.float32)
    stats, sweeps = row_stats_by_pieces(policy, x, lanes=128, kept_per_lane=4)
    check_row_stats(policy, x, stats, reference.row_stats_ref(policy, x))
    enough = setting == dict(top_k=9) or (few and "top_k" not in setting)
    assert (sweeps == 1) == enough


def test_without_the_horizon_the_distributions_are_wrong(monkeypatch):
    """The mutant takes what lanes kept for all there is."""
    above = thresholds._above

    def blind(rows, by, at, missing, need):
        return above(rows, by, at, missing & False, need)

    policy, x = cases.settings(1000), hard(1000, 3, 1000, "float32")
    monkeypatch.setattr(thresholds, "_above", blind)
    stats, _ = row_stats_by_pieces.__wrapped__(policy, x, lanes=8, kept_per_lane=3)
    with pytest.raises(AssertionError):
        check_row_stats(policy, x, stats, reference.row_stats_ref(policy, x))
