"""The exact distribution of the verifiers as fused verification judges them, and that of its whole loop."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.certify import chi_square, exact
from jspec.certify.tiny import tiny
from jspec.pallas import compat
from jspec.pallas.verify import fused, reference
from jspec.pallas.verify.gumbel_argmax_tpu import gumbel_argmax_tpu
from jspec.pallas.verify.row_stats_tpu import row_stats_tpu
from jspec.sampling import policy, verifiers
from jspec.sampling.drafters.ngram import ngram
from jspec.types import Verifier

CHANCES = {"token": fused.token_chances, "block": fused.block_chances}
CASES = [
    ("token", "sampled chain"),
    ("token", "points chain"),
    ("token", "points tree"),
    ("block", "sampled chain"),
]
READS = fused.Reads(
    lambda *given: (reference.row_stats_ref(*given[:2]), given[2]()), reference.gumbel_argmax_ref
)
FLOAT32 = 2e-6


def as_verifier(name: str, forget: bool = False) -> Verifier:
    """A verifier made of the numbers that fused verification judges by; ``forget``: of no refused draft."""

    def round_of(proposal, p) -> fused.Round:
        nodes, vocab = proposal.tokens.shape[0], p.shape[-1]
        # A node with its children comes with one distribution.
        x = jnp.broadcast_to(p, (nodes, vocab))[None].astype(jnp.float32)
        batch = jax.tree.map(lambda part: part[None], proposal)
        if batch.logq is not None:
            batch = batch._replace(logq=batch.logq.astype(jnp.float32))
        rows = policy.make(1, vocab)
        zero, keys = jnp.zeros(1, jnp.int32), jnp.zeros((1, 2), jnp.uint32)
        return fused.round_of(READS, rows, keys, zero, batch, x)

    def accept(proposal, p):
        return CHANCES[name](round_of(proposal, p))[0][0].astype(p.dtype)

    def residual(proposal, p, node):
        round = round_of(proposal, p)
        last = fused.last_draw(round, CHANCES[name](round)[1], node[None].astype(jnp.int32))
        if forget:
            last = last._replace(child=last.child * 0 - 1, refused=last.refused * 0 - 1)
        logp, weights = reference.remaining(round.policy, round.x, round.stats, last, round.proposal.logq)
        return jnp.where(jnp.max(weights) > -jnp.inf, weights, logp)[0].astype(p.dtype)

    return Verifier(f"fused {name}", accept, residual)


def worst(verifier: Verifier, kind: str) -> float:
    _, parent, drafts = exact.DRAFT_KINDS[kind]
    names = ["neutral", "temperature 0", "top-p"]
    errors = []
    for pair, name in itertools.product(list(exact.INSTANCES)[:2], names):
        p, q, wanted = exact.all_probs(pair, name, parent)
        errors.append(exact.error(verifier, p, drafts(q), wanted))
    return max(errors)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_exact_distribution(name, kind):
    assert worst(as_verifier(name), kind) < FLOAT32


def test_a_draw_that_forgets_what_was_refused_is_seen():
    assert worst(as_verifier("token", forget=True), "points chain") > 0.01


@pytest.mark.parametrize(
    "verifier",
    [
        verifiers.token,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (verifiers.block, verifiers.coupled)),
    ],
)
def test_distribution_of_the_loop(verifier):
    found = chi_square(*tiny(0), ngram(2, min_ngram=1), None, verifier, rows=500, decide=fused.make())
    assert min(found.p_values) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_the_loop_writes_the_same_text_with_interpreted_kernels(verifier):
    """Same uniform numbers, same noise: not only the same distribution."""
    target, params = tiny(0)
    interpret = compat.tpu_interpreter()
    kernels = fused.make(
        *(functools.partial(one, interpret=interpret) for one in (row_stats_tpu, gumbel_argmax_tpu))
    )
    texts = []
    for options in ({}, {"decide": kernels}):
        samples = jspec.speculative_sample(
            params,
            jnp.array([[1, 2, 1, 2], [3, 0, 3, 0]]),
            target=target,
            key=[5, 6],
            drafter=ngram(2, min_ngram=1),
            max_new_tokens=4,
            temperature=[1.0, 0.8],
            top_p=[1.0, 0.9],
            verifier=verifier,
            chunk=4,
            logprobs=True,
            **options,
        )
        texts.append((samples.tokens.tolist(), np.asarray(samples.logprobs.processed)))
    assert texts[0][0] == texts[1][0]
    np.testing.assert_allclose(texts[0][1], texts[1][1], rtol=1e-4, atol=1e-5)
