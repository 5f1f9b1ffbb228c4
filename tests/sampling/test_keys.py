"""Keys: no use of a row's key meets another, and no row's keys depend on other rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jspec.errors import JspecError
from jspec.sampling import keys


def data(key):
    return tuple(jax.random.key_data(key).tolist())


def test_every_use_has_its_own_key():
    roles = (keys.DRAFT, keys.ACCEPT, keys.NEXT)
    uses = [
        data(keys.fold(row, jnp.array(position), role, node))
        for row in keys.row_keys([0, 1], 2)
        for position, role, node in itertools.product((0, 1, 2, 3), roles, (0, 1, 2))
    ]
    noise = [
        data(jax.random.fold_in(keys.wrap(row), position))
        for row in keys.coupled_keys(keys.row_keys([0, 1], 2))
        for position in range(4)
    ]
    assert len({*uses, *noise}) == len(uses) + len(noise)


def test_a_row_key_depends_on_its_own_seed_only():
    wide, skip_empty_rounds = keys.row_keys([3, 2**40, 5], 3), keys.row_keys([5], 1)
    assert wide.dtype == jnp.uint32
    assert wide[2].tolist() == skip_empty_rounds[0].tolist()
    assert len({tuple(row) for row in wide.tolist()}) == 3


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_one_key_serves_batches_of_any_size(impl):
    key = jax.random.key(3, impl=impl)
    wide = jax.jit(lambda key: keys.row_keys(key, 5))(key)
    assert wide[:2].tolist() == keys.row_keys(key, 2).tolist()
    assert len({tuple(row) for row in wide.tolist()}) == 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([1, 2], "2 seeds were given for 3 rows"),
        ([1, 2, -1], "seed -1 is out of range"),
        ([1, 2, 2**64], "from 0 to 2**64 - 1"),
        (jnp.zeros(2, jnp.uint32), "must be one jax.random.key"),
        (jax.random.split(jax.random.key(0), 3), "must be one jax.random.key"),
    ],
)
def test_what_is_no_seed_is_refused(source, words):
    with pytest.raises(JspecError) as error:
        keys.row_keys(source, 3)
    assert words in str(error.value)


def test_a_draft_key_is_the_key_of_the_drafts():
    row, position = keys.row_keys([7, 8], 2), jnp.array([5, 6])
    drafts = keys.wrap(keys.draft_keys(row, position))
    assert data(jax.random.fold_in(drafts[1], 3)) == data(keys.fold(row[1], position[1], keys.DRAFT, 3))


def test_coupled_noise_goes_by_row_and_position():
    one, other = keys.coupled_keys(keys.row_keys([7, 8], 2))
    noise = keys.coupled_noise(one, jnp.array(5), 9)
    assert noise.tolist() == keys.coupled_noise(one, jnp.array(5), 9).tolist()
    assert noise.tolist() != keys.coupled_noise(one, jnp.array(6), 9).tolist()
    assert noise.tolist() != keys.coupled_noise(other, jnp.array(5), 9).tolist()


def test_draws_follow_the_weights_whatever_their_total():
    p = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    weights = jnp.log(jnp.asarray(p, jnp.float32)) + 7.0
    draws = jax.vmap(keys.draw, (0, None))(jax.random.split(jax.random.key(1), 40_000), weights)
    seen = np.bincount(draws, minlength=5)
    assert seen[1] == 0
    assert chisquare(seen[p > 0], 40_000 * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize("vocab", [1, 7, 128, 129, 1000, 49152])
def test_best_is_argmax(vocab):
    weights = jax.random.normal(jax.random.key(vocab), (3, 2, vocab))
    ties = weights.at[..., vocab // 2 :].set(5.0)
    hidden = jnp.full((2, vocab), -jnp.inf).at[:, -1].set(-3.0)
    for each in (weights, ties, hidden):
        assert keys.best(each).tolist() == jnp.argmax(each, axis=-1).tolist()
