"""Trees: masks, depths and the walk, against a walk written as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.sampling import keys
from jspec.types import Proposal, Tree, Verifier
from tests import oracle

pytestmark = pytest.mark.quick


def slow_walk(parent, passed):
    path, at = [0], 0
    for node in range(1, len(parent)):
        if parent[node] == at and passed[node]:
            at = node
            path.append(node)
    return path


def random_parents(rng, nodes):
    return [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]


ODD = Verifier(
    "odd", lambda star, probs: star.tokens % 2 * 1.0, lambda star, probs, node: probs[node], random=False
)


def walked(layout, passed, depth):
    """Path and accepted drafts where the nodes that pass have odd tokens."""
    batch, nodes = passed.shape
    proposal = Proposal(jnp.array(passed, jnp.int32), layout, jnp.full(batch, nodes))
    probs = jnp.zeros((batch, nodes, 3))
    found = jax.jit(oracle.judge, static_argnums=(0, 5))(
        ODD, keys.row_keys(range(batch), batch), jnp.zeros(batch, jnp.int32), proposal, probs, depth
    )
    return found.path, found.accepted


@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_the_walk_is_the_slow_walk(nodes):
    rng = np.random.default_rng(nodes)
    parent = np.array([random_parents(rng, nodes) for _ in range(200)])
    passed = rng.random(parent.shape) < 0.6
    path, accepted = walked(tree.from_parents(jnp.array(parent)), passed, nodes - 1)
    for row in range(len(parent)):
        wanted = slow_walk(parent[row], passed[row])
        assert path[row, : len(wanted)].tolist() == wanted and not path[row, len(wanted) :].any()
        assert int(accepted[row]) == len(wanted) - 1


def test_a_chain_walks_as_the_tree_that_it_is():
    passed = np.random.default_rng(0).random((50, 6)) < 0.7
    chain = tree.chain(50, 6)
    branching = tree.from_parents(chain.parent)
    assert (branching.depth == chain.depth).all()
    for one, other in zip(walked(chain, passed, 5), walked(branching, passed, 5), strict=True):
        assert (one == other).all()


def test_unused_nodes_hang_nowhere():
    """A node of parent -1 behind the root is never reached, though it passed."""
    layout = tree.from_parents(jnp.array([[-1, 0, -1, 2]]))
    path, accepted = walked(layout, np.array([[True, False, True, True]]), 2)
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
