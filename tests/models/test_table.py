"""The table model: context over the cache's border and along a tree's path."""

import jax.numpy as jnp
import numpy as np

from jspec import tree
from tests import oracle


def test_every_node_sees_its_own_path():
    model, params = oracle.random_table(order=3, vocab=5)
    text, nodes = [4, 1], [2, 3, 0, 4, 1]
    parent = [-1, 0, 0, 1, 2]
    cache = model.init_cache(1, 16)
    _, _, cache = model.forward(params, cache, jnp.array([text]), tree.chain(1, 2))
    cache = model.commit(cache, None, jnp.array([2]))
    layout = tree.from_parents(jnp.array([parent]))
    hidden, _, cache = model.forward(params, cache, jnp.array([nodes]), layout)
    logits = model.unembed(params, hidden)
    for node in range(5):
        path, at = [], node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parent[at]
        context = ([5] * 3 + text + path)[-3:]
        np.testing.assert_array_equal(logits[0, node], params[tuple(context)])
    kept = model.commit(cache, jnp.array([[0, 2, 4]]), jnp.array([3]))
    assert kept.tokens[0, :5].tolist() == [4, 1, 2, 0, 1] and kept.length.tolist() == [5]
