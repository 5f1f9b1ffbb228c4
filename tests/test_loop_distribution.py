"""The product: what the whole compiled loop writes has exactly the target's distribution.

A mixed, ragged batch of many rows per setting; χ² of the first tokens against the distribution
that is enumerated without cache or loop. A right program gives p-values spread over
(0, 1); the mutants sit at 0. The drafters are those of the conformance list.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode
from jspec.certify import loop
from jspec.certify.tiny import tiny
from jspec.sampling import keys, verifiers
from jspec.sampling.drafters.draft_model import draft_model
from jspec.types import Drafter
from tests.sampling.drafters.cases import BUSHY, BY_CASE, CASES, FIVE_TOKENS

ROWS = 2000
quick, slow = pytest.mark.quick, pytest.mark.slow
MARKS = {"ngram": quick, "model": quick, "eagle3_static": ()}


def marks_of(case):
    return MARKS.get(case.name, slow if case.head or case.variant else ())


@pytest.mark.parametrize(
    ("verifier", "case"),
    [
        *[pytest.param("token", case, marks=marks_of(case), id=f"token-{case.name}") for case in CASES],
        *[
            pytest.param(verifier, BY_CASE[name], marks=marks, id=f"{verifier}-{name}")
            for verifier, name, marks in (
                ("block", "ngram", slow),
                ("block", "model", ()),
                ("block", "eagle_chain", slow),
                ("coupled", "none", slow),
                ("coupled", "model", ()),
                ("coupled", "eagle_chain", slow),
                ("coupled", "eagle3_static", slow),
                ("coupled", "eagle_dynamic", slow),
                ("coupled", "medusa_static", slow),
            )
        ],
    ],
)
def test_the_loop_writes_the_distribution(verifier, case):
    rig = case.rig(FIVE_TOKENS)
    found = loop.chi_square(*rig, verifiers.find_verifier(verifier), rows=ROWS)
    assert min(found.p_values) > 1e-4, found
    assert (found.acceptance_rate or 0) > 0.05 or case.name == "none"


@slow
@pytest.mark.parametrize("name", ["model", "eagle3_static", "eagle_dynamic", "medusa_static"])
def test_the_coupled_text_is_the_plain_one(name):
    assert loop.coupled_differences(*BY_CASE[name].rig(FIVE_TOKENS), verifiers.coupled) == 0


def mutant(case, change):
    """The rig of a case with its proposal changed."""
    rig = case.rig(FIVE_TOKENS)

    def propose(params, state, root, context):
        proposal, state = rig.drafter.propose(params, state, root, context)
        return change(proposal, context), state

    return rig._replace(drafter=Drafter(**{**rig.drafter.__dict__, "propose": propose}))


def hotter(proposal, context):
    """All distributions are told at another temperature."""
    return proposal._replace(logq=jax.nn.log_softmax(proposal.logq * 0.5, axis=-1))


def full_siblings(proposal, context):
    """Later siblings are told with the distribution that the first of them was drawn from."""
    parent = jnp.array(BUSHY.parent)
    first = jnp.array([list(BUSHY.parent).index(above) for above in BUSHY.parent])
    return proposal._replace(logq=jnp.where(parent[:, None] >= 0, proposal.logq[:, first], proposal.logq))


def peeking(proposal, context):
    """Draws its guesses with the noise that the verifier will use for the next token."""
    row_key = PEEK["key"]

    def row(key, position, logq):
        noise = jax.vmap(lambda node: keys.gumbel(keys.fold(key, position, keys.NEXT, node), logq.shape[-1]))
        return jnp.argmax(logq[1:] + noise(jnp.arange(logq.shape[0] - 1)), axis=-1)

    drafts = jax.vmap(row)(row_key, context.position, proposal.logq)
    return proposal._replace(tokens=jnp.concatenate([proposal.tokens[:, :1], drafts], axis=1))


PEEK: dict = {}


@pytest.mark.parametrize(
    ("name", "change", "rows"),
    [
        pytest.param("model", hotter, ROWS, id="hotter", marks=quick),
        pytest.param("model", peeking, 2 * ROWS, id="peeking", marks=slow),
        pytest.param("eagle3_static", full_siblings, 2 * ROWS, id="full siblings", marks=slow),
        pytest.param("eagle3_static", hotter, 2 * ROWS, id="hotter tree", marks=slow),
    ],
)
def test_a_drafter_that_lies_or_peeks_is_caught(name, change, rows):
    rig = mutant(BY_CASE[name], change)
    decoder = decode.make_decoder(rig.target, rig.drafter, verifiers.token, chunk=4)
    PEEK["key"] = loop.request(decoder, rows)[0].key
    found = loop.chi_square(*rig, verifiers.token, rows=rows)
    assert min(found.p_values) < 1e-6, found


@slow
def test_draft_noise_by_position_alone_is_caught():
    """Mutant: a refused draft's noise comes again, after the block verifier has looked at it."""
    by_position = dataclasses.replace(verifiers.block, coupled=True)
    found = loop.chi_square(*BY_CASE["model"].rig(FIVE_TOKENS), by_position, rows=8 * ROWS)
    assert min(found.p_values) < 1e-6, found


def test_the_draft_of_the_target_itself_is_always_accepted():
    """K + 1 tokens a pass at any temperature and with any setting: the floor of the draft model."""
    model, params = tiny(0)
    for verifier in (verifiers.token, verifiers.block, verifiers.coupled):
        decoder = decode.make_decoder(model, draft_model(model, 3), verifier, chunk=4)
        asked, _ = loop.request(decoder, 40)
        state = decoder.run(params, params, decoder.init(params, params, asked))
        np.testing.assert_array_equal(state.stats.accepted, state.stats.proposed)
        full = np.asarray(state.length - state.prompt_length) == loop.LENGTH
        assert (np.asarray(state.stats.rounds)[full] == 1).all()
