"""Draft ids that are no token: such a node is absent. Nothing of it is emitted, and nothing of p is lost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import tree
from jspec.certify.loop import p_value
from jspec.models import table
from jspec.sampling import siblings
from jspec.sampling.drafters import ngram
from jspec.sampling.verifiers import block, coupled, greedy, outcomes, token, typical_lossy
from jspec.types import Proposal
from tests import oracle

V = 5
CHAIN, FORK = (-1, 0, 1, 2), (-1, 0, 0, 1)
FOREIGN = (-1, -200, V, V + 7)


def row(tokens, parent, drawn: bool, count=None):
    layout = tree.chain(1, 4) if parent is CHAIN else tree.from_parents(jnp.array([parent]))
    logq = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (4, V))) if drawn else None
    return Proposal(
        jnp.array(tokens), jax.tree.map(lambda x: x[0], layout), jnp.array(count or len(tokens)), logq
    )


LOGP = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), (4, V)))


@pytest.mark.parametrize("bad", FOREIGN)
@pytest.mark.parametrize("verifier", [token, block, coupled, greedy, typical_lossy], ids=lambda v: v.name)
@pytest.mark.parametrize(("parent", "drawn"), list(itertools.product((CHAIN, FORK), (False, True))))
def test_a_foreign_node_is_absent(verifier, parent, drawn, bad):
    """Its chance is 0, and every residual is that of the draft without it, to the bit."""
    if parent is FORK and "tree" not in verifier.growths:
        return
    for at in (1, 2, 3):
        tokens = [0, 1, 2, 3]
        tokens[at] = bad
        found = outcomes(verifier, row(tokens, parent, drawn), LOGP)
        if parent is CHAIN:  # what hangs on it goes with it
            without = outcomes(verifier, row([0, 1, 2, 3], parent, drawn, count=at), LOGP)
            assert (found.accept[at:] == 0).all()
        else:
            above = [-1 if node == at else p for node, p in enumerate(parent)]
            without = outcomes(verifier, row([0, 1, 2, 3], tuple(above), drawn), LOGP)
            assert found.accept[at] == 0
        np.testing.assert_array_equal(found.residual, without.residual)
        kept = np.arange(4) < at if parent is CHAIN else np.arange(4) != at
        np.testing.assert_array_equal(found.accept[kept], without.accept[kept])


def test_the_cure_is_needed(monkeypatch):
    """Mutant: without it such a node has the chance of some other token."""
    monkeypatch.setattr(siblings, "without_foreign_ids", lambda proposal, vocab: proposal)
    assert outcomes(token, row([0, V, 2, 3], CHAIN, False), LOGP).accept[1] > 0


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_the_loop_with_placeholders_in_the_prompt(verifier):
    """n-grams copy them from the prompt; a uniform target of five tokens stays uniform, and writes none."""
    rows = 4000
    prompt = jnp.array([[0, -200, 1, V + 4, 0, -200, 1, V + 4, 0]])
    samples = jspec.speculative_sample(
        jnp.zeros((V + 1, V)), jnp.repeat(prompt, rows, axis=0), target=table.make(V), key=range(rows),
        drafter=ngram(3, min_ngram=1), max_new_tokens=2, verifier=verifier, chunk=8,
    )  # fmt: skip
    texts = np.asarray(samples.tokens)
    assert texts.min() >= 0 and texts.max() < V and (np.asarray(samples.length) == 2).all()
    uniform = {pair: 1 / V**2 for pair in itertools.product(range(V), repeat=2)}
    assert p_value(texts.tolist(), uniform) > 1e-4


def test_greedy_text_with_foreign_drafts_is_the_plain_one():
    model, params = oracle.tiny_llama()
    script = np.tile([3, -7, 400, 5], (1, 40))[:, :128]
    drafter = oracle.scripted(script, 4)
    texts = [
        jspec.speculative_sample(
            params, [[3, 4, 5]], target=model, key=[0], drafter=one, temperature=0, chunk=8, max_new_tokens=20
        ).tokens.tolist()
        for one in (drafter, None)
    ]
    assert texts[0] == texts[1]
