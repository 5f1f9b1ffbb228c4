"""The loop's walk down a tree does what the plan says, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jspec import tree
from jspec.certify import enumeration
from jspec.sampling import keys, walk
from jspec.sampling.verifiers import coupled, greedy, outcomes, token
from jspec.types import Proposal
from tests.oracle import judge

TREES, EACH, NODES, VOCAB = 6, 5000, 7, 4
DEPTH = NODES - 1
VERIFIERS = [greedy, token, coupled]


def named(verifier) -> str:
    return verifier.name


@functools.cache
def some_trees(seed: int = 0, kinds: str = "mixed"):
    """Random trees and distributions; a node in three is a point mass, and siblings may be duplicates."""
    rng = np.random.default_rng(seed)
    parent = np.array(
        [[-1, *(rng.integers(max(0, i - 3), i) for i in range(1, NODES))] for _ in range(TREES)]
    )
    parent[0, 1:] = 0  # a star
    tokens = rng.integers(0, VOCAB, (TREES, NODES))
    p, q = np.log(rng.dirichlet(np.full(VOCAB, 0.7), (2, TREES, NODES)) + 1e-9)
    q[rng.random((TREES, NODES)) < 1 / 3] = -np.inf
    count = np.append([NODES] * (TREES - 2), rng.integers(3, NODES, 2))
    logq = None if kinds == "points" else jnp.asarray(q, jnp.float32)
    proposal = Proposal(
        jnp.asarray(tokens, jnp.int32), tree.from_parents(jnp.asarray(parent)), jnp.asarray(count), logq
    )
    return proposal, jnp.asarray(p, jnp.float32)


def repeated(values):
    return jax.tree.map(lambda x: jnp.repeat(x, EACH, axis=0), values)


@functools.cache
def decision(verifier):
    return jax.jit(functools.partial(judge, verifier, depth=DEPTH))


KEYS = keys.row_keys(range(TREES * EACH), TREES * EACH)


def fits(kinds: str, decide=None) -> list[float]:
    """For each tree, the χ² probability of where its rows ended and what followed, by the plan."""
    proposal, probs = some_trees(kinds=kinds)
    position = jnp.arange(TREES * EACH, dtype=jnp.int32) % 50
    verdict = jax.device_get((decide or decision(token))(KEYS, position, *repeated((proposal, probs))))
    last = np.take_along_axis(verdict.path, verdict.accepted[:, None], axis=1)[:, 0]
    follows = np.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)[:, 0]
    accept, residual = jax.vmap(functools.partial(outcomes, token))(proposal, probs)
    found = []
    for row in range(TREES):
        draft = enumeration.Draft(1.0, (), proposal.tree.parent[row].tolist(), int(proposal.count[row]))
        expected = np.zeros((NODES, VOCAB))
        for path, chance in enumeration._ends(draft, np.asarray(accept[row], np.float64)):
            expected[path[-1]] = chance * np.asarray(jax.nn.softmax(residual[row, path[-1]]), np.float64)
        rows = slice(row * EACH, (row + 1) * EACH)
        seen = np.zeros((NODES, VOCAB))
        np.add.at(seen, (last[rows], follows[rows]), 1)
        expected *= EACH / expected.sum()
        often = expected > 5
        pairs = [np.append(x[often], x[~often].sum()) for x in (seen, expected)]
        found.append(chisquare(*(x[pairs[1] > 0] for x in pairs)).pvalue)
    return found


@pytest.mark.parametrize("kinds", ["mixed", "points"])
def test_the_walk_is_the_plan(kinds):
    found = fits(kinds)
    assert min(found) > 1e-4, found


def shared(key, position, nodes):
    """One coin for all nodes: in a star, for all siblings."""
    fold = jax.vmap(keys.fold, (0, 0, None, None))(key, position, keys.ACCEPT, 0)
    return jnp.broadcast_to(jax.vmap(jax.random.uniform)(fold)[:, None], (len(key), nodes))


def test_siblings_that_share_a_uniform_are_found(monkeypatch):
    monkeypatch.setattr(walk, "uniforms_for", shared)
    assert fits("mixed", jax.jit(functools.partial(judge, token, depth=DEPTH)))[0] < 1e-12


BATCH = 60


def some_rows(seed: int = 0):
    """Different trees in one batch."""
    proposal, probs = jax.tree.map(lambda x: jnp.repeat(x, BATCH // TREES, axis=0), some_trees(seed))
    return KEYS[:BATCH], jnp.arange(BATCH, dtype=jnp.int32) % 7, proposal, probs


@pytest.mark.parametrize("verifier", VERIFIERS, ids=named)
def test_a_row_does_not_see_its_neighbours(verifier):
    rows = some_rows()
    together = decision(verifier)(*rows)
    for row in (0, 11, 24, 42, 59):  # among copies of itself, all walking as far as it does
        alone = decision(verifier)(
            *jax.tree.map(lambda x, row=row: jnp.repeat(x[row : row + 1], BATCH, 0), rows)
        )
        for whole, copies in zip(together, alone, strict=True):
            np.testing.assert_array_equal(whole[row], copies[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("verifier", VERIFIERS, ids=named)
def test_what_is_no_distribution_ends_the_walk_and_changes_nothing_before(verifier, value):
    key, position, proposal, probs = some_rows()
    clean, ended = decision(verifier)(key, position, proposal, probs), 0
    for node in (0, 1, 3):
        bad = decision(verifier)(key, position, proposal, probs.at[:, node].set(value))
        for row in range(BATCH):
            accepted = int(clean.accepted[row])
            path = clean.path[row, : accepted + 1].tolist()
            if node in path:
                ended += 1
                end = path.index(node)
                assert int(bad.accepted[row]) == end and not bad.ok[row]
                assert bad.path[row].tolist() == path[: end + 1] + [0] * (DEPTH - end)
                assert (bad.tokens[row, :end] == clean.tokens[row, :end]).all()
            else:
                assert all((x[row] == y[row]).all() for x, y in zip(bad, clean, strict=True))
    assert clean.ok.all() and ended > BATCH


@pytest.mark.parametrize(
    ("verifier", "told"), [(greedy, False), (token, True), (token, False), (coupled, False)]
)
def test_a_chain_that_is_given_as_a_tree(verifier, told):
    """The same keys give the same verdict."""
    rng = np.random.default_rng(1)
    rows, nodes = 500, DEPTH + 1
    p, q = (jnp.asarray(np.log(rng.dirichlet(np.ones(VOCAB), (rows, nodes))), jnp.float32) for _ in range(2))
    drafts = rng.integers(0, VOCAB, (rows, nodes))
    drafts[::2, 1:] = np.asarray(p[::2, :-1]).argmax(-1)  # long runs
    tokens = jnp.asarray(drafts, jnp.int32)
    count, position = jnp.asarray(rng.integers(1, nodes + 1, rows)), jnp.arange(rows, dtype=jnp.int32)
    layout = tree.chain(rows, nodes)
    wide = tree.from_parents(layout.parent)
    key = KEYS[:rows]
    straight, walked = (
        decision(verifier)(key, position, Proposal(tokens, shape, count, q if told else None), p)
        for shape in (layout, wide)
    )
    for name in ("path", "accepted", "ok"):
        np.testing.assert_array_equal(getattr(straight, name), getattr(walked, name))
    written = np.arange(nodes) <= np.asarray(straight.accepted)[:, None]
    np.testing.assert_array_equal(straight.tokens[written], walked.tokens[written])
    np.testing.assert_allclose(straight.logprob[written], walked.logprob[written], rtol=1e-6)
    assert set(straight.accepted.tolist()) >= {0, 1, 2, 3}


def test_a_uniform_of_zero_does_not_pass_a_chance_of_zero(monkeypatch):
    monkeypatch.setattr(walk, "uniforms_for", lambda key, position, nodes: jnp.zeros((len(key), nodes)))
    key, position, proposal, probs = some_rows()
    proposal = proposal._replace(tokens=jnp.zeros_like(proposal.tokens), logq=None)
    verdict = jax.jit(functools.partial(judge, token, depth=DEPTH))(
        key, position, proposal, probs.at[:, :, 0].set(-jnp.inf)
    )
    assert not verdict.accepted.any()
