"""Draft models that differ from the target in vocabulary, context or temper."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode
from jspec.models import llama
from jspec.sampling.drafters.draft_model import draft_model
from jspec.sampling.verifiers import token
from jspec.serve.stream import stream
from tests import oracle

SLOTS, PROMPTS, LIMIT = 96, [[3], [4, 9, 2] * 5], 50


def resized(vocab: int, context_length: int = 160):
    """The tiny target with its vocabulary cut or padded: same rows where both have them."""
    _, params = oracle.tiny_llama()
    config = dataclasses.replace(oracle.CONFIG, vocab_size=vocab, context_length=context_length)
    rows = jnp.arange(vocab) % oracle.VOCAB
    scale = jnp.where(jnp.arange(vocab) < oracle.VOCAB, 1.0, 9.0)  # loud where the target has nothing
    head = params["head"][:, rows] * scale
    return llama.make(config), {**params, "embed": params["embed"][rows], "head": head}


def run(draft, draft_params, *, k=3, **sampling):
    target, params = oracle.tiny_llama()
    drafter = draft_model(draft, k, vocab_size=target.vocab_size)
    decoder = decode.make_decoder(target, drafter, token, chunk=8)
    state = decoder.init(params, draft_params, oracle.request(target, PROMPTS, SLOTS, LIMIT, **sampling))
    return decoder, params, state


@pytest.mark.parametrize(
    "vocab",
    [
        pytest.param(28, id="smaller"),
        *(pytest.param(v, id=i, marks=pytest.mark.slow) for v, i in ((32, "equal"), (45, "larger"))),
    ],
)
def test_any_vocabulary_size_is_lossless(vocab):
    draft, draft_params = resized(vocab)
    decoder, params, state = run(draft, draft_params)
    state = decoder.run(params, draft_params, state)
    target, _ = oracle.tiny_llama()
    assert oracle.texts(state) == [oracle.greedy_text(target, params, p, LIMIT) for p in PROMPTS]
    rate = state.stats.accepted.sum() / state.stats.proposed.sum()
    assert rate == 1.0 if vocab == 32 else rate > 0.1


@pytest.mark.parametrize("vocab", [20, 45])
def test_no_draft_is_outside_either_vocabulary(vocab):
    draft, draft_params = resized(vocab)
    decoder, params, state = run(draft, draft_params, temperature=1.5)
    proposal, _ = decoder.propose(params, draft_params, state)
    assert proposal.logq.shape == (2, 4, oracle.VOCAB)
    assert (np.asarray(proposal.tokens) < min(vocab, oracle.VOCAB)).all()
    q = np.exp(np.asarray(proposal.logq[:, 1:]))
    np.testing.assert_allclose(q.sum(-1), 1.0, rtol=1e-5)
    assert not q[..., vocab:].any()


def test_a_draft_whose_context_ends_first_stops_drafting_there():
    draft, draft_params = resized(32, context_length=30)
    decoder, params, state = run(draft, draft_params)
    target, _ = oracle.tiny_llama()
    drafted = []
    for state, info in stream(decoder, params, draft_params, state):
        drafted.append(info.proposed.tolist())
        assert (np.asarray(state.draft.cache.length) <= 30).all()
    assert oracle.texts(state) == [oracle.greedy_text(target, params, p, LIMIT) for p in PROMPTS]
    assert drafted[0] == [3, 3] and drafted[-1][0] == 0
    # position 30 is drafted from position 29, the last that the draft has
    assert int(state.stats.proposed[0].sum()) >= 20


def test_a_proposal_moves_no_length_and_absorbing_is_a_prefill():
    """The draft's cache after random rounds is that of a fresh pass over the text."""
    draft, draft_params = oracle.tiny_llama(seed=1)
    decoder, params, state = run(draft, draft_params, temperature=1.0)
    for _ in range(6):
        before = np.asarray(state.draft.cache.length)
        proposal, state = decoder.propose(params, draft_params, state)
        np.testing.assert_array_equal(state.draft.cache.length, before)
        np.testing.assert_array_equal(before, state.length)
        state, _ = decoder.advance(params, draft_params, state, proposal)
    oracle.assert_cache_is_prefill(draft, draft_params, state._replace(cache=state.draft.cache))


def test_logq_is_the_distribution_of_each_draft_given_its_own_prefix():
    """Penalties see the drafted prefix, as they do at the target."""
    draft, draft_params = oracle.tiny_llama(seed=1)
    settings = dict(temperature=0.9, repetition_penalty=1.7, presence_penalty=0.6, top_p=0.9)
    decoder, params, state = run(draft, draft_params, **settings)
    proposal, state = decoder.propose(params, draft_params, state)
    for row, prompt in enumerate(PROMPTS):
        for node in (1, 2, 3):
            text = prompt + proposal.tokens[row, 1:node].tolist()
            alone = draft_model(draft, 1)
            one = decode.make_decoder(draft, alone, token, chunk=8)
            asked = oracle.request(draft, [text], SLOTS, LIMIT, **settings)
            asked = asked._replace(length=jnp.array([len(text)]))
            fresh = one.init(draft_params, draft_params, asked)
            fresh = fresh._replace(prompt_length=jnp.array([len(prompt)]))
            probs, _ = one.propose(draft_params, draft_params, fresh)
            np.testing.assert_allclose(
                jnp.exp(probs.logq[0, 1]), jnp.exp(proposal.logq[row, node]), rtol=1e-4, atol=1e-6
            )


def test_k_below_one_is_refused():
    with pytest.raises(ValueError, match="num_speculative_tokens = 0"):
        draft_model(oracle.tiny_llama()[0], 0)


def test_drafts_depend_on_the_row_key_alone():
    draft, draft_params = oracle.tiny_llama(seed=1)
    decoder, params, state = run(draft, draft_params, temperature=1.0, seeds=[5, 6])
    both = decoder.run(params, draft_params, state)
    decoder, params, state = run(draft, draft_params, temperature=1.0, seeds=[9, 6])
    other = decoder.run(params, draft_params, state)
    assert oracle.texts(both)[1] == oracle.texts(other)[1]
    assert oracle.texts(both)[0] != oracle.texts(other)[0]
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[1], b[1]), both.stats, other.stats))
