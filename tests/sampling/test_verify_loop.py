"""`verify` itself: the distribution of a loop of rounds, its keys, its rows, and what is no distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jspec import ragged, tree
from jspec.certify import enumeration
from jspec.errors import JspecError
from jspec.sampling import keys, walk
from jspec.sampling.verifiers import block, check_legal, coupled, greedy, token
from jspec.types import Proposal
from tests.oracle import judge, next_token

VOCAB, DRAFTS = 3, 3
TABLES = np.random.default_rng(1).gamma(0.3, size=(2, VOCAB, VOCAB, VOCAB)) + 0.02
P, Q = TABLES / TABLES.sum(
    -1, keepdims=True
)  # distributions by the last two tokens: one would hide a reused key
LOGP, LOGQ = (np.log(table).astype(np.float32) for table in (P, Q))
ROWS = keys.row_keys(range(30_000), 30_000)


def by_round(key, position, i):
    """The noise that draft i is drawn with: here as it should be."""
    return keys.gumbel(jax.random.fold_in(keys.wrap(keys.draft_keys(key[None], position[None])[0]), i), VOCAB)


def by_position(key, position, i):
    return keys.gumbel(keys.fold(key, position + i, keys.DRAFT, 0), VOCAB)


def thief(key, position, i):
    return keys.gumbel(keys.fold(key, position, keys.NEXT, i - 1), VOCAB)


def meet(key, position, i):
    return keys.coupled_noise(keys.coupled_keys(key), position + i, VOCAB)


def propose(noise, key, position, last, drafts):
    """Chains after the last two tokens, drawn with some noise, and p at their nodes."""
    node = jnp.arange(1, drafts + 1)
    noise_BKV = jax.vmap(jax.vmap(noise, (None, None, 0)), (0, 0, None))(key, position, node)
    tokens, logq, pairs = [last[1]], [jnp.zeros((len(key), VOCAB))], [last]
    for i in range(drafts):
        logq.append(jnp.asarray(LOGQ)[pairs[-1]])
        tokens.append(jnp.argmax(logq[-1] + noise_BKV[:, i], axis=-1))
        pairs.append((tokens[-2], tokens[-1]))
    probs = jnp.stack([jnp.asarray(LOGP)[pair] for pair in pairs], axis=1)
    count = jnp.full((len(key),), drafts + 1)
    return Proposal(jnp.stack(tokens, 1), tree.chain(len(key), drafts + 1), count, jnp.stack(logq, 1)), probs


def simulate(verifier, key, length, drafts=DRAFTS, noise=by_round, point_masses=False):
    """The first ``length`` tokens after (0, 0) of a loop of rounds, a row for each key."""
    rows = jnp.arange(len(key))

    def round_of(_, carry):
        text, end = carry
        last = (text[rows, end - 2], text[rows, end - 1])
        proposal, probs = propose(noise, key, end - 1, last, drafts)
        if point_masses:
            proposal = proposal._replace(logq=None)
        verdict = judge(verifier, key, end - 1, proposal, probs, drafts)
        return ragged.append(text, end, verdict.tokens, verdict.accepted + 1), end + verdict.accepted + 1

    start = jnp.zeros((len(key), 2 + length * (drafts + 1)), jnp.int32), jnp.full((len(key),), 2)
    text, _ = jax.jit(lambda: jax.lax.fori_loop(0, length, round_of, start))()
    return np.asarray(text[:, 2 : 2 + length])


def fit(texts):
    """The χ² probability of texts under the target; texts expected fewer than 5 times are one."""
    probs = enumeration.target_distribution(lambda prefix: P[(0, 0, *prefix)[-2:]], texts.shape[1])
    seen = np.bincount(np.ravel_multi_index(texts.T, probs.shape), minlength=probs.size)
    expected = len(texts) * probs.ravel()
    seen, expected = (np.append(x[expected >= 5], x[expected < 5].sum()) for x in (seen, expected))
    return chisquare(seen, expected).pvalue


@pytest.mark.parametrize(
    ("verifier", "drafts"), [(token, 0), (token, DRAFTS), (block, DRAFTS), (coupled, 0), (coupled, DRAFTS)]
)
def test_a_loop_of_rounds_keeps_the_distribution(verifier, drafts):
    assert fit(simulate(verifier, ROWS, 4, drafts)) > 1e-3


SECOND_USES = {
    "every round the same keys": lambda position, role, node: (position * 0, role, node),
    "one coin for all nodes": lambda position, role, node: (position, role, 0),
    "one key for all roles": lambda position, role, node: (position, 0, node),
}


@pytest.mark.parametrize("name", SECOND_USES)
def test_a_key_that_is_used_twice_is_found(name, monkeypatch):
    fold = keys.fold
    monkeypatch.setattr(keys, "fold", lambda key, *use: fold(key, *SECOND_USES[name](*use)))
    assert fit(simulate(token, ROWS, 4)) < 1e-12
    if name == "every round the same keys":
        assert fit(simulate(block, ROWS, 4)) < 1e-12


def test_drafts_keyed_by_position_are_found(monkeypatch):
    """The block verifier looks at drafts beyond the last accepted one, which the next round would repeat."""
    fold = keys.fold
    monkeypatch.setattr(keys, "fold", lambda key, position, role, node: fold(key, position + node, role, 0))
    assert fit(simulate(block, ROWS, 4, noise=by_position)) < 1e-12


def test_a_drafter_that_reads_the_verifiers_key_is_found():
    assert fit(simulate(token, ROWS, 4, noise=thief, point_masses=True)) < 1e-12


def test_the_coupled_text_does_not_depend_on_the_drafter():
    plain = simulate(coupled, ROWS[:3000], 8, drafts=0)
    assert (simulate(coupled, ROWS[:3000], 8, DRAFTS) == plain).all()
    assert (simulate(coupled, ROWS[:3000], 8, 2, noise=meet) == plain).all()


def test_how_often_coupled_drafts_are_accepted():
    p, q = P[0, 0], Q[0, 0]
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(VOCAB))
    zero = jnp.zeros(len(ROWS), jnp.int32)

    @jax.jit
    def accepted():
        proposal, probs = propose(meet, ROWS, zero + 1, (zero, zero), 1)
        return judge(coupled, ROWS, zero + 1, proposal, probs, 1).accepted

    seen = accepted().mean()
    assert abs(seen - expected) < 4 * np.sqrt(expected * (1 - expected) / len(ROWS))


BATCH = 100


@jax.jit
def some_rows():
    """Ragged proposals and their distributions."""
    row, position, zero = ROWS[:BATCH], jnp.arange(BATCH) + 3, jnp.zeros(BATCH, jnp.int32)
    proposal, probs = propose(by_round, row, position, (zero, zero), DRAFTS)
    return row, position, proposal._replace(count=1 + jnp.arange(BATCH) % (DRAFTS + 1)), probs


@functools.cache
def decision(verifier):
    return jax.jit(functools.partial(judge, verifier, depth=DRAFTS))


@pytest.mark.parametrize("verifier", [greedy, token, block, coupled], ids=lambda verifier: verifier.name)
def test_a_row_does_not_see_its_neighbours(verifier):
    rows = some_rows()
    decide = decision(verifier)
    together = decide(*rows)
    for b in range(5):
        row = slice(b, b + 1)
        alone = decide(*jax.tree.map(lambda x, row=row: x[row], rows))
        assert jax.tree.all(jax.tree.map(lambda x, y, row=row: (x[row] == y).all(), together, alone))


@pytest.mark.parametrize("verifier", [greedy, token, block, coupled], ids=lambda verifier: verifier.name)
def test_what_is_no_distribution_ends_the_walk_and_changes_nothing_before(verifier):
    row, position, proposal, probs = some_rows()
    proposal = proposal._replace(count=jnp.full_like(proposal.count, DRAFTS + 1))
    clean = judge(
        verifier, row, position, proposal._replace(count=jnp.full_like(proposal.count, 3)), probs, DRAFTS
    )
    bad = judge(verifier, row, position, proposal, probs.at[:, 2].set(jnp.nan), DRAFTS)
    assert (bad.path == clean.path).all() and (bad.ok == (clean.accepted < 2)).all()
    assert (next_token(bad) == next_token(clean))[bad.ok].all() and not bad.ok.all() and bad.ok.any()


def test_a_uniform_of_zero_does_not_pass_a_chance_of_zero(monkeypatch):
    monkeypatch.setattr(walk, "uniforms_for", lambda key, position, nodes: jnp.zeros((len(key), nodes)))
    row, position, proposal, probs = some_rows()
    probs = probs.at[jnp.arange(BATCH), 0, proposal.tokens[:, 1]].set(-jnp.inf)
    decide = jax.jit(functools.partial(judge, token, depth=DRAFTS))
    assert not decide(row, position, proposal, probs).accepted.any()


def test_verifiers_for_chains_refuse_trees():
    branches = tree.from_parents(jnp.array([[-1, 0, 0, 0]]))
    everything = Proposal(jnp.array([[0, 0, 1, 2]]), branches, jnp.array([4]))
    probs = jnp.broadcast_to(jnp.asarray(LOGP[0, 0]), (1, 4, VOCAB))
    check_legal(block, "chain")
    with pytest.raises(JspecError, match="'block' judges drafts that grow as chain, not as tree"):
        judge(block, ROWS[:1], jnp.array([1]), everything, probs, 1)
    for verifier in (greedy, coupled, token):
        check_legal(verifier, "tree")
        decide = jax.jit(functools.partial(judge, verifier, depth=1))
        assert decide(ROWS[:1], jnp.array([1]), everything, probs).accepted.tolist() == [1]
