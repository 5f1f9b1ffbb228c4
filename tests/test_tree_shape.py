"""Shapes of static trees."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.errors import JspecError
from jspec.tree import EAGLE_TREE, chain_shape, from_paths, likeliest

pytestmark = pytest.mark.quick


def test_the_tree_of_eagle_1():
    assert len(EAGLE_TREE.parent) == 26 and EAGLE_TREE.depth == 5
    assert np.bincount(EAGLE_TREE.levels).tolist() == [1, 4, 8, 8, 3, 2]
    assert [EAGLE_TREE.widest(level) for level in range(1, 6)] == [4, 3, 3, 3, 2]
    assert not EAGLE_TREE.is_chain


def test_a_shape_is_what_follows_from_its_parents():
    made = from_paths([(1,), (0,), (0, 1), (0, 0), (1, 0), (1, 0, 0)])
    assert made.parent == (-1, 0, 0, 1, 1, 2, 5) and made.rank == (0, 0, 1, 0, 1, 0, 0)
    layout, wanted = made.tree(2), tree.from_parents(jnp.array([made.parent] * 2))
    for got, right in zip(layout, wanted, strict=True):
        np.testing.assert_array_equal(got, right)
    assert [made.inner(level).tolist() for level in range(3)] == [[0], [1, 2], [5]]


def test_a_chain_is_given_as_a_chain():
    assert chain_shape(3) == from_paths([(0,), (0, 0), (0, 0, 0)]) and chain_shape(3).is_chain
    assert chain_shape(3).tree(2).mask is None
    assert not from_paths([(0,), (1,)]).is_chain


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no node besides the root"),
        ([(0,), (0,)], r"the path \(0,\) twice"),
        ([()], r"the path \(\) twice, or an empty one"),
        ([(0,), (1, 0)], r"\(1, 0\) without its parent \(1,\)"),
        ([(0,), (2,)], r"\(2,\) without its parent \(\) or its better sibling \(1,\)"),
        ([(-1,)], "its better sibling"),
    ],
)
def test_a_tree_with_holes_is_refused(paths, message):
    with pytest.raises(JspecError, match=message):
        from_paths(paths)


@pytest.mark.parametrize(
    ("size", "depth", "topk", "decay"), [(5, 3, 4, 0.5), (12, 4, 3, 0.3), (9, 2, 5, 0.7)]
)
def test_the_likeliest_nodes_are_those_of_a_search(size, depth, topk, decay):
    made = likeliest(size, depth, topk, decay)
    assert len(made.parent) == size + 1 and made.depth <= depth and max(made.rank) < topk
    chances = [1.0]
    for node in range(1, size + 1):
        chances.append(chances[made.parent[node]] * (1 - decay) * decay ** made.rank[node])
    every = [
        np.prod([(1 - decay) * decay**rank for rank in path])
        for levels in range(1, depth + 1)
        for path in itertools.product(range(topk), repeat=levels)
    ]
    np.testing.assert_allclose(sorted(chances[1:]), sorted(every)[-size:])


def test_more_nodes_than_there_are():
    assert len(likeliest(6, 2, 2).parent) == 7
    with pytest.raises(JspecError, match="has 6 nodes, not 7"):
        likeliest(7, 2, 2)
