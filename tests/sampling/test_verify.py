"""Verification verifiers: the exact distribution of every verifier, and mutants that must fail."""

import importlib
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.certify import enumeration
from jspec.sampling import siblings
from jspec.sampling.verifiers import block, greedy, token
from jspec.sampling.verifiers.token import excess
from jspec.types import Proposal

VOCAB, DRAFTS = 3, 3


def never(probs, *tokens):
    """The distribution without these tokens."""

    def without(prefix):
        weights = probs(prefix).copy()
        weights[list(tokens)] = 0
        return weights / weights.sum()

    return without


def hot(probs):
    """The distribution at temperature 0."""
    return lambda prefix: np.eye(len(probs(prefix)))[probs(prefix).argmax()]


def chains(q, vocab=VOCAB, **sizes):
    return enumeration.sampled_chains(q, vocab, **{"drafts": DRAFTS, **sizes})


def broken(drafts, value):
    """Drafts whose second distribution is said to be something that is no distribution."""
    for draft in drafts:
        draft.q[2] = value
    return drafts


# Each makes a target and a drafter from two random distributions.
INSTANCES = {
    "random": lambda p, q: (p, chains(q)),
    "q has zeros": lambda p, q: (p, chains(never(q, 1))),
    "p has zeros": lambda p, q: (never(p, 1), chains(q)),
    "p = q": lambda p, q: (p, chains(p)),
    "disjoint": lambda p, q: (never(p, 1), chains(never(q, 0, 2))),
    "padded vocabulary": lambda p, q: (never(p, 2), chains(never(q, 2))),
    "temperature 0": lambda p, q: (hot(p), chains(q)),
    "both at temperature 0": lambda p, q: (hot(p), chains(hot(q))),
    "point masses": lambda p, q: (p, enumeration.point_chain((1, 0, 2))),
    "point masses, p has zeros": lambda p, q: (never(p, 0), enumeration.point_chain((1, 0, 2))),
    "short row": lambda p, q: (p, chains(q, drafts=2, nodes=4)),
    "short row of point masses": lambda p, q: (p, enumeration.point_chain((1,), nodes=4)),
    "nothing proposed": lambda p, q: (p, chains(q, drafts=0, nodes=4)),
    "stops after a doubtful draft": lambda p, q: (p, cut(chains(q), 2)),
    "q is NaN": lambda p, q: (p, broken(chains(q), np.nan)),
    "q is infinite": lambda p, q: (p, broken(chains(q), np.inf)),
    "q is empty": lambda p, q: (p, broken(chains(q), 0.0)),
}


def cut(drafts, count):
    """Rows stop, where the first token was unlikely, with this many nodes."""
    return [d._replace(count=count) if d.q[1, d.tokens[1]] < 0.3 else d for d in drafts]


def instance(kind, seed):
    return INSTANCES[kind](
        enumeration.random_distribution(seed, VOCAB), enumeration.random_distribution(seed + 1000, VOCAB)
    )


QUICK = ("random", "point masses", "short row")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.quick if k in QUICK else ()) for k in INSTANCES]
)
@pytest.mark.parametrize("verifier", [token, block], ids=lambda verifier: verifier.name)
def test_the_distribution_is_the_targets(verifier, kind):
    for seed in range(4):
        target, drafts = instance(kind, seed)
        assert enumeration.error(verifier, target, drafts) < 1e-12
        assert enumeration.error(verifier, target, drafts, np.float32) < 2e-6


def test_the_distribution_is_the_targets_on_four_tokens():
    for seed, verifier in itertools.product(range(2), (token, block)):
        q = enumeration.random_distribution(seed + 1000, 4)
        assert (
            enumeration.error(
                verifier, enumeration.random_distribution(seed, 4), enumeration.sampled_chains(q, 4, DRAFTS)
            )
            < 1e-12
        )


@pytest.mark.parametrize("kind", INSTANCES)
def test_greedy_writes_the_text_of_temperature_0(kind):
    for seed in range(4):
        target, drafts = instance(kind, seed)
        made = enumeration.output(greedy, target, drafts, 4, tail=hot(target)).probs
        assert enumeration.distance(made, enumeration.target_distribution(hot(target), 4)) < 1e-12


def test_greedy_walks_down_a_tree():
    branches = enumeration.Draft(1.0, (0, 0, 1, 2, 0, 1), (-1, 0, 0, 0, 2, 2), 6)
    for seed in range(6):
        target = enumeration.random_distribution(seed, VOCAB)
        made = enumeration.output(greedy, target, [branches], 3, tail=hot(target))
        assert enumeration.distance(made.probs, enumeration.target_distribution(hot(target), 3)) < 1e-12
        first = target(()).argmax()
        assert made.emitted == 2 + (first == 1 and target((1,)).argmax() < 2)


@pytest.mark.parametrize("kind", INSTANCES)
def test_block_never_emits_less_than_token(kind):
    for seed in range(8):
        target, drafts = instance(kind, seed)
        by_block, by_token = (
            enumeration.output(verifier, target, drafts, 4).emitted for verifier in (block, token)
        )
        assert by_block > by_token - 1e-12
        if kind == "random":
            assert by_block > by_token + 1e-4


def test_a_draft_that_is_the_target_is_taken_whole():
    for seed, verifier in itertools.product(range(4), (token, block)):
        target, drafts = instance("p = q", seed)
        assert enumeration.output(verifier, target, drafts, 4).emitted == pytest.approx(4, abs=1e-12)


def test_the_papers_example():
    """2403.10444: of two drafts 10/9 are accepted by token, 11/9 by block."""
    p, q = (lambda prefix: np.array([1, 2]) / 3), (lambda prefix: np.array([2, 1]) / 3)
    for verifier, accepted in ((token, 10 / 9), (block, 11 / 9)):
        emitted = enumeration.output(verifier, p, enumeration.sampled_chains(q, 2, 2), 3).emitted
        assert emitted - 1 == pytest.approx(accepted, abs=1e-12)


def other_q(drafts, change):
    """Drafts that lie about the distribution they were drawn from."""
    changed = (draft.q if draft.q is None else change(draft.q) for draft in drafts)
    return [d._replace(q=q / q.sum(-1, keepdims=True)) for d, q in zip(drafts, changed, strict=True)]


def softmax_q(q):
    """Greedy drafts that come with the distribution instead of with its argmax."""
    return [
        greedy._replace(q=draft.q)
        for greedy in chains(hot(q))
        for draft in chains(q)
        if draft.tokens == greedy.tokens
    ]


def padded_accept(proposal, probs):
    return block.accept(proposal._replace(count=jnp.full_like(proposal.count, probs.shape[0])), probs)


def forgetful(proposal, probs, node):
    return probs[node]


block_module = importlib.import_module("jspec.sampling.verifiers.block")


def first_failure(proposal, probs):
    """The paper's uniform numbers, thrown in turn up to the first that fails."""
    reach = block_module.log_reach(proposal, probs)
    total = jax.vmap(lambda i: excess(proposal, probs, i, reach[i]).sum())(jnp.arange(probs.shape[0]))
    return block_module._own_chance(total, reach, proposal.count)


MUTANTS = {
    "token: residual forgotten": (replace(token, residual=forgetful), chains),
    "block: residual forgotten": (replace(block, residual=forgetful), chains),
    "block: residual of the token verifier": (replace(block, residual=token.residual), chains),
    "block: up to the first failure": (replace(block, accept=first_failure), chains),
    "block: padding judged": (replace(block, accept=padded_accept), lambda q: chains(q, drafts=2, nodes=4)),
    "token: q at another temperature": (token, lambda q: other_q(chains(q), np.sqrt)),
    "block: q at another temperature": (block, lambda q: other_q(chains(q), np.sqrt)),
    "token: softmax q for argmax drafts": (token, softmax_q),
    "block: softmax q for argmax drafts": (block, softmax_q),
    "token: doubtful drafts dropped": (token, lambda q: cut(chains(q), 1)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    verifier, drafter = MUTANTS[name]
    errors = [
        enumeration.error(
            verifier,
            enumeration.random_distribution(seed, VOCAB),
            drafter(enumeration.random_distribution(seed + 1000, VOCAB)),
        )
        for seed in range(4)
    ]
    assert max(errors) > 0.01


def test_a_nan_anywhere_in_a_long_row_is_no_distribution():
    """XLA's maximum on CPU overlooks it there."""
    logq = jnp.full((2, 49152), -10.0).at[1, 30011].set(jnp.nan)
    layout = jax.tree.map(lambda part: part[0], tree.chain(1, 2))
    proposal = Proposal(jnp.array([0, 1]), layout, jnp.array(2), logq)
    assert jax.jit(siblings.has_distribution)(proposal).tolist() == [True, False]
