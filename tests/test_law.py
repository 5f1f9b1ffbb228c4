"""The product: what the whole compiled loop writes has exactly the target's law.

A mixed, ragged batch of many rows per setting; χ² of the first tokens against the law
that is enumerated without cache or loop. A right program gives p-values spread over
(0, 1); the mutants sit at 0.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode
from jspec.certify import loop as law
from jspec.certify.tiny import tiny
from jspec.sampling import keys, verify
from jspec.sampling.drafters.model import model as draft_model
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.types import Drafter

ROWS = 4000
RULES = {rule.name: rule for rule in (verify.token, verify.block, verify.coupled)}
DRAFTERS = {
    "none": (none, None),
    "ngram": (lambda: ngram(3, min_ngram=1), None),
    "model": (lambda: draft_model(tiny(1)[0], 3), 1),
    "greedy model": (lambda: draft_model(tiny(1)[0], 3, greedy=True), 1),
}


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("token", "none"),
        ("token", "ngram"),
        ("token", "model"),
        ("token", "greedy model"),
        ("block", "ngram"),
        ("block", "model"),
        ("coupled", "none"),
        ("coupled", "model"),
    ],
)
def test_the_loop_writes_the_law(rule, drafter):
    make, seed = DRAFTERS[drafter]
    dparams = None if seed is None else tiny(seed)[1]
    found = law.chi_square(*tiny(0), make(), dparams, RULES[rule], rows=ROWS)
    assert min(found.p_values) > 1e-4, found


def mutant_drafter(change) -> Drafter:
    """The draft model with its proposal changed."""
    drafter = draft_model(tiny(1)[0], 3)

    def propose(params, state, root, context):
        proposal, state = drafter.propose(params, state, root, context)
        return change(proposal, context), state

    return Drafter(**{**drafter.__dict__, "propose": propose})


def hotter(proposal, context):
    return proposal._replace(logq=jax.nn.log_softmax(proposal.logq * 0.5, axis=-1))


def peeking(proposal, context):
    """Draws its guesses with the noise that the verifier will use for the next token."""
    row_key = PEEK["key"]

    def row(key, position, logq):
        noise = jax.vmap(lambda node: keys.gumbel(keys.fold(key, position, keys.NEXT, node), logq.shape[-1]))
        return jnp.argmax(logq[1:] + noise(jnp.arange(logq.shape[0] - 1)), axis=-1)

    drafts = jax.vmap(row)(row_key, context.position, proposal.logq)
    return proposal._replace(tokens=jnp.concatenate([proposal.tokens[:, :1], drafts], axis=1))


PEEK: dict = {}


@pytest.mark.parametrize("change", [hotter, pytest.param(peeking, marks=pytest.mark.slow)])
def test_a_drafter_that_lies_or_peeks_is_caught(change):
    PEEK["key"] = law.request(tiny(0)[0], ROWS)[0].key
    found = law.chi_square(*tiny(0), mutant_drafter(change), tiny(1)[1], verify.token, rows=ROWS)
    assert min(found.p_values) < 1e-12


@pytest.mark.slow
def test_draft_noise_by_position_alone_is_caught():
    """Mutant: a refused draft's noise comes again, after the block rule has looked at it."""
    by_position = dataclasses.replace(verify.block, coupled=True)
    found = law.chi_square(*tiny(0), draft_model(tiny(1)[0], 3), tiny(1)[1], by_position, rows=4 * ROWS)
    assert min(found.p_values) < 1e-6, found


def test_the_draft_of_the_target_itself_is_always_accepted():
    """K + 1 tokens a pass at any temperature and with any setting: the floor of the draft model."""
    model, params = tiny(0)
    for rule in RULES.values():
        decoder = decode.make_decoder(model, draft_model(model, 3), rule, chunk=4)
        asked, _ = law.request(model, 40)
        state = decoder.run(params, params, decoder.init(params, params, asked))
        np.testing.assert_array_equal(state.stats.accepted, state.stats.proposed)
        full = np.asarray(state.length - state.prompt_length) == law.LENGTH
        assert (np.asarray(state.stats.rounds)[full] == 1).all()
