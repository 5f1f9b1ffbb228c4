"""Trees: the exact distribution of the verifiers that judge them, and mutants that must fail."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.certify import enumeration
from jspec.sampling import siblings
from jspec.sampling.verifiers import greedy, token
from tests.sampling.test_verify import forgetful, hot, never

PAIR, STAR, DEEP, FORK = (-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2), (-1, 0, 0, 2)
DEPTH = {PAIR: 1, STAR: 1, DEEP: 2, FORK: 2}
SHAPES = {"pair": (PAIR, 3), "star": (STAR, 3), "deep": (DEEP, 3), "fork": (FORK, 4)}  # parents, vocabulary


def again(probs, taken):
    """Drawn whatever the siblings: with replacement."""
    return probs, probs


def left(probs, taken):
    """Drawn from what the earlier siblings left; if that is nothing, the first token that none has."""
    rest = probs.copy()
    rest[taken] = 0.0
    if rest.any():
        return rest / rest.sum(), rest / rest.sum()
    free = [token for token in range(len(probs)) if token not in taken] or [0]
    return np.eye(len(probs))[free[0]], rest


def best(probs, taken):
    """The best that no sibling has: a point mass."""
    return np.eye(len(probs))[
        np.argmax(np.where(np.isin(np.arange(len(probs)), taken), -1, probs))
    ], 0 * probs


def same(probs, taken):
    """Always token 1, so that siblings are duplicates."""
    return np.eye(len(probs))[1], np.full_like(probs, np.nan)


def drafts(q, shape, kinds, count=None):
    """Every tree, also those that never come; ``kinds``: how each node is drawn, and what it tells."""
    parent, vocab = SHAPES[shape]
    made = []
    for tokens in itertools.product(range(vocab), repeat=len(parent) - 1):
        paths, told, weight = [()], [np.zeros(vocab)], 1.0
        for node, own in enumerate(tokens, start=1):
            above = paths[parent[node]]
            taken = [tokens[n - 1] for n in range(1, node) if parent[n] == parent[node]]
            probs, said = kinds[(node - 1) % len(kinds)](q(above), taken)
            weight *= probs[own]
            paths.append((*above, own))
            told.append(said)
        made.append(enumeration.Draft(weight, (0, *tokens), parent, count or len(parent), np.array(told)))
    return made


KINDS = {
    "with replacement": (again,),
    "without replacement": (left,),
    "top-k": (best,),
    "mixed": (left, best, left, again, left),
    "mixed, a point first": (best, left, same, left, again),
    "duplicates": (same,),
}
POINTS = {
    "top-k": (best,),
    "duplicates": (same,),
    "duplicates of the best": (best, same, best),
}


def all_probs(seed, vocab):
    """Pairs of distributions, of target and draft."""
    p, q = enumeration.random_distribution(seed, vocab), enumeration.random_distribution(seed + 1000, vocab)
    yield "random", p, q
    yield "p has zeros", never(p, 1), q
    yield "q has zeros", p, never(q, 1)  # without replacement it is exhausted
    yield "p = q", p, p
    yield "disjoint", never(p, 1), never(q, 0, 2)
    yield "padded vocabulary", never(p, 2), never(q, 2)
    yield "p at temperature 0", hot(p), q
    yield "q at temperature 0", p, hot(q)


def output(verifier, p, trees, dtype=np.float64, tail=None):
    """The distribution of as many tokens as the deepest path and the one after it."""
    return enumeration.output(verifier, p, trees, 1 + DEPTH[trees[0].parent], dtype, tail)


def error(verifier, p, trees, dtype=np.float64):
    return enumeration.distance(
        output(verifier, p, trees, dtype).probs,
        enumeration.target_distribution(p, 1 + DEPTH[trees[0].parent]),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_distribution_is_the_targets(shape, kind):
    vocab = SHAPES[shape][1]
    for seed in range(2 if shape == "deep" else 4):
        for name, p, q in all_probs(seed, vocab):
            trees = drafts(q, shape, KINDS[kind])
            assert sum(tree.weight for tree in trees) == pytest.approx(1, abs=1e-12)
            assert error(token, p, trees) < 1e-12, name
            if shape == "star":
                assert error(token, p, trees, np.float32) < 2e-6, name


def points(q, shape, kinds, **sizes):
    """The one tree of such a drafter, which tells no distributions."""
    return [tree._replace(q=None) for tree in drafts(q, shape, kinds, **sizes) if tree.weight > 0]


@pytest.mark.parametrize("kind", POINTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_point_masses_without_distributions(shape, kind):
    """They are judged without a pass over the vocabulary, to the same end."""
    for seed in range(4):
        for name, p, q in all_probs(seed, SHAPES[shape][1]):
            trees = points(q, shape, POINTS[kind])
            assert len(trees) == 1 and error(token, p, trees) < 1e-12, name
            told = [trees[0]._replace(q=np.zeros((len(trees[0].tokens), len(p(())))))]
            made, other = output(token, p, trees), output(token, p, told)
            assert enumeration.distance(made.probs, other.probs) < 1e-12
            assert made.emitted == pytest.approx(other.emitted, abs=1e-12)


def test_point_masses_are_worth_the_mass_of_their_tokens():
    """A star keeps a draft as often as the target's own draw is one of its tokens, each counted once."""
    for seed in range(4):
        p = enumeration.random_distribution(seed, 3)
        for tokens in itertools.product(range(3), repeat=3):
            trees = [enumeration.Draft(1.0, (0, *tokens), STAR, 4)]
            assert output(token, p, trees).emitted - 1 == pytest.approx(
                p(())[list(set(tokens))].sum(), abs=1e-12
            )


def test_rows_that_use_some_of_the_nodes():
    for kind, count in itertools.product(("without replacement", "mixed"), (1, 2, 3, 5)):
        for name, p, q in all_probs(0, 3):
            assert error(token, p, drafts(q, "deep", KINDS[kind], count=count)) < 1e-12, name


@pytest.mark.parametrize("shape", ["star", "fork"])
@pytest.mark.parametrize("kind", ["without replacement", "mixed"])
def test_greedy_writes_the_text_of_temperature_0(shape, kind):
    for seed in range(4):
        for name, p, q in all_probs(seed, SHAPES[shape][1]):
            made = output(greedy, p, drafts(q, shape, KINDS[kind]), tail=hot(p)).probs
            wanted = enumeration.target_distribution(hot(p), made.ndim)
            assert enumeration.distance(made, wanted) < 1e-12, name


def test_without_replacement_is_never_worse():
    better = []
    for seed in range(10):
        for name, p, q in all_probs(seed, 3):
            for shape in ("star", "deep") if seed < 2 else ("star",):
                one, other = (output(token, p, drafts(q, shape, (how,))).emitted for how in (left, again))
                assert one > other - 1e-12, (name, shape, seed)
                better.append(one > other + 1e-4)
    assert sum(better) > len(better) / 4


def test_siblings_are_better_than_one_draft():
    for seed in range(4):
        for name, p, q in all_probs(seed, 3):
            star = drafts(q, "star", (left,))
            gains = np.diff(
                [output(token, p, [tree._replace(count=n) for tree in star]).emitted for n in (1, 2, 3, 4)]
            )
            assert (gains > -1e-12).all(), name
            assert gains[0] == pytest.approx(np.minimum(p(()), q(())).sum(), abs=1e-12)


def softmax(probs, taken):
    """The best, told with the distribution instead of as a point mass."""
    return best(probs, taken)[0], probs


def unnormalised(probs, taken):
    """Drawn without replacement, told without the division."""
    drawn, _ = left(probs, taken)
    return drawn, np.where(np.isin(np.arange(len(probs)), taken), 0, probs)


def whole(probs, taken):
    """Drawn without replacement, told with it."""
    return left(probs, taken)[0], probs


def hidden(probs, taken):
    """Drawn without replacement, told as a point mass."""
    return left(probs, taken)[0], 0 * probs


def likely(q):
    """Of three drawn children only the two that the draft thinks likelier are submitted."""
    kept = []
    for tree in drafts(q, "star", (again,)):
        worst = 1 + min(range(3), key=lambda i: tree.q[1 + i, tree.tokens[1 + i]])
        nodes = [node for node in range(4) if node != worst]
        tokens = tuple(tree.tokens[node] for node in nodes)
        kept.append(enumeration.Draft(tree.weight, tokens, PAIR, 3, tree.q[nodes]))
    return kept


def doubtful(q):
    """The last child is dropped where it was unlikely."""
    return [
        tree._replace(count=2) if tree.q[2, tree.tokens[2]] < 0.6 else tree
        for tree in drafts(q, "pair", (left,))
    ]


def each_alone(star, probs):
    """Each sibling is asked as if it were the first."""
    p, node = probs[0, star.tokens], jnp.arange(len(star.tokens))
    q = 1.0
    if star.logq is not None:
        q = jnp.where(siblings.has_distribution(star), jnp.exp(star.logq[node, star.tokens]), 1.0)
    return jnp.minimum(jnp.exp(p) / q, 1.0)


def first_only(star, probs, node):
    """Only the first child's distribution is taken from the target's."""
    first = siblings.children(star) & (jnp.cumsum(siblings.children(star)) == 1)
    parent = jnp.where(first, 0, -1)
    return siblings.remainder(star._replace(tree=star.tree._replace(parent=parent)), probs[0])


def of_shape(shape, *kinds):
    return lambda q: drafts(q, shape, kinds)


MUTANTS = {
    "p/q for the best, with the softmax": (token, of_shape("star", softmax)),
    "p/q for the best in a deep tree": (token, of_shape("deep", softmax)),
    "without replacement, q not renormalised": (token, of_shape("star", unnormalised)),
    "without replacement, told with": (token, of_shape("star", whole)),
    "drawn children chosen by their q": (token, likely),
    "a drawn child dropped by its q": (token, doubtful),
    "residual forgotten": (replace(token, residual=forgetful), of_shape("pair", left)),
    "residual forgotten in a deep tree": (replace(token, residual=forgetful), of_shape("deep", left)),
    "residual forgotten after point masses": (
        replace(token, residual=forgetful),
        lambda q: points(q, "pair", (best,)),
    ),
    "residual of the first sibling alone": (replace(token, residual=first_only), of_shape("pair", left)),
    "earlier siblings' mass not removed": (replace(token, accept=each_alone), of_shape("pair", left)),
    "points' mass not removed": (replace(token, accept=each_alone), lambda q: points(q, "pair", (best,))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    verifier, drafter = MUTANTS[name]
    errors = [
        error(
            verifier,
            enumeration.random_distribution(seed, 3),
            drafter(enumeration.random_distribution(seed + 1000, 3)),
        )
        for seed in range(4)
    ]
    assert max(errors) > 0.01


def test_drafts_told_as_point_masses_keep_the_distribution():
    """No mutant: any choice is lossless as long as no distribution is told."""
    for seed in range(4):
        for _, p, q in all_probs(seed, 3):
            assert error(token, p, drafts(q, "star", (hidden,))) < 1e-12
            chosen = [tree._replace(q=None) for tree in likely(q)]
            assert error(token, p, chosen) < 1e-12
