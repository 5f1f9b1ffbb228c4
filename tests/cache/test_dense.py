"""The cache: capacity, ragged writes that drop what does not fit, commits of paths."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import dense


def entries(rng, batch, rows, heads=2, head_dim=4):
    return jnp.array(rng.standard_normal((batch, rows, heads, head_dim)), jnp.float32)


@pytest.mark.parametrize("rows", [1, 3])
def test_write_reaches_its_slots_and_no_committed_one(rows):
    rng = np.random.default_rng(0)
    entry = dense.init([10], 3, 2, 4, jnp.float32).layers[0]
    length = jnp.array([0, 4, 9])
    keys = entries(rng, 3, rows)
    new = dense.write(entry, keys, keys + 1, length)
    for row, start in enumerate(length.tolist()):
        fit = min(rows, 10 - start)
        got = new.keys[row, :, start : start + fit]
        np.testing.assert_array_equal(got, keys[row, :fit].swapaxes(0, 1))
        assert not new.keys[row, :, :start].any()
    np.testing.assert_array_equal(new.values[0, :, :rows], keys[0].swapaxes(0, 1) + 1)


def test_commit_of_a_path_compacts_it():
    rng = np.random.default_rng(1)
    cache = dense.init([12] * 2, 2, 2, 4, jnp.float32)._replace(length=jnp.array([3, 5]))
    keys = entries(rng, 2, 5)
    layers = tuple(dense.write(e, keys, 2 * keys, cache.length) for e in cache.layers)
    path, count = jnp.array([[0, 2, 4], [0, 3, 0]]), jnp.array([3, 2])
    new = dense.commit(cache._replace(layers=layers), path, count)
    assert new.length.tolist() == [6, 7]
    for entry in new.layers:
        for row, nodes in enumerate([[0, 2, 4], [0, 3]]):
            start = int(cache.length[row])
            got = entry.keys[row, :, start : start + len(nodes)]
            np.testing.assert_array_equal(got, keys[row, jnp.array(nodes)].swapaxes(0, 1))
            np.testing.assert_array_equal(entry.values[row, :, start : start + len(nodes)], 2 * got)


def test_capacity_leaves_room_for_the_scratch_of_finished_rows():
    for prompt, new, nodes, chunk in [(1, 1, 1, 64), (1000, 24, 5, 512), (100, 200, 65, 64)]:
        slots = dense.capacity(prompt, new, nodes, chunk)
        assert slots >= prompt + new + max(nodes, chunk) and slots % 64 == 0


def test_windows_are_written_where_rows_are():
    """The form for TPUs; a ring goes to the plain one."""
    entry = dense.Entry(*jnp.arange(2 * 2 * 3 * 12 * 4.0).reshape(2, 2, 3, 12, 4))
    rows = -jnp.arange(2 * 5 * 3 * 4.0).reshape(2, 5, 3, 4)
    for length in ([0, 7], [3, 3]):
        for wrap in (False, True):
            given = entry, rows, rows + 1, jnp.array(length), wrap
            for one, other in zip(dense.write(*given), dense.write_windows(*given), strict=True):
                np.testing.assert_array_equal(one, other)
