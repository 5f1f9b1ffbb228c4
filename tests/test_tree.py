"""Trees: masks, depths and the walk, against a walk written as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.types import Tree
from tests import oracle


def slow_walk(parent, passed):
    path, at = [0], 0
    for node in range(1, len(parent)):
        if parent[node] == at and passed[node]:
            at = node
            path.append(node)
    return path


def random_parents(rng, nodes):
    return [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]


@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_walk_is_the_slow_walk(nodes):
    rng = np.random.default_rng(nodes)
    parent = np.array([random_parents(rng, nodes) for _ in range(200)])
    passed = rng.random(parent.shape) < 0.6
    path, accepted = tree.walk(tree.from_parents(jnp.array(parent)), jnp.array(passed), nodes - 1)
    for row in range(len(parent)):
        wanted = slow_walk(parent[row], passed[row])
        assert path[row, : len(wanted)].tolist() == wanted and not path[row, len(wanted) :].any()
        assert int(accepted[row]) == len(wanted) - 1


def test_a_chain_walks_as_the_tree_that_it_is():
    rng = np.random.default_rng(0)
    passed = jnp.array(rng.random((50, 6)) < 0.7)
    chain = tree.chain(50, 6)
    branching = tree.from_parents(chain.parent)
    assert (branching.depth == chain.depth).all()
    for one, other in zip(tree.walk(chain, passed, 5), tree.walk(branching, passed, 5), strict=True):
        assert (one == other).all()


def test_unused_nodes_hang_nowhere():
    """A node of parent -1 behind the root is never reached, though it passed."""
    layout = tree.from_parents(jnp.array([[-1, 0, -1, 2]]))
    path, accepted = tree.walk(layout, jnp.array([[True, False, True, True]]), 2)
    assert path.tolist() == [[0, 0, 0]] and accepted.tolist() == [0]


def test_a_tree_may_be_run_in_several_passes():
    """Rows of a later pass see those of the earlier ones that their mask names."""
    model, params = oracle.tiny_llama()
    whole = tree.from_parents(jnp.array([[-1, -1, 0, 1, 1, 3]] * 2))
    tokens = jax.random.randint(jax.random.key(0), (2, 6), 0, oracle.VOCAB)
    cache = model.init_cache(2, 32)
    _, _, cache = model.forward(params, cache, tokens + 3, tree.chain(2, 6))
    cache = model.commit(cache, None, jnp.array([6, 2]))
    want, _, _ = model.forward(params, cache, tokens, whole)
    got = []
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        rows = Tree(whole.parent[:, start:stop], whole.depth[:, start:stop], whole.mask[:, start:stop, :stop])
        hidden, _, cache = model.forward(params, cache, tokens[:, start:stop], rows)
        got.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want, rtol=1e-4, atol=1e-5)
