"""The functional front door: alone, under jit, inside a larger program; rows that differ in everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import tree
from jspec.decode import make_decoder
from jspec.errors import JspecError
from jspec.sampling import distribution, policy
from jspec.sampling.drafters.draft_model import draft_model
from jspec.sampling.drafters.ngram import ngram
from jspec.types import Drafter, History
from tests import oracle

NEW = 20
PROMPTS = jnp.array([[3, 0, 0, 0], [4, 9, 2, 7], [1, 2, 0, 0]])
LENGTHS = jnp.array([1, 4, 2])
DRAFTER = ngram(3, min_ngram=1)


def sample(params, prompts=PROMPTS, lengths=LENGTHS, **options):
    model, _ = oracle.tiny_llama()
    settings = dict(target=model, drafter=DRAFTER, max_new_tokens=NEW, chunk=8, key=[7, 8, 9]) | options
    return jspec.speculative_sample(params, prompts, prompt_length=lengths, **settings)


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_greedy_and_sampling_rows_side_by_side_are_each_their_own_batch_of_one(verifier):
    """Settings, seeds, limits and stop tokens that differ by row."""
    _, params = oracle.tiny_llama()
    rows = dict(temperature=[0.0, 0.9, 1.3], top_p=[1.0, 0.9, 1.0], repetition_penalty=[1.0, 1.2, 1.0])
    limit, stop = jnp.array([20, 12, 18]), jnp.array([[-1, -1], [5, -1], [11, 30]])
    together = sample(params, max_new_tokens_per_row=limit, stop_token_ids=stop, verifier=verifier, **rows)
    for row in range(3):
        one = slice(row, row + 1)
        settings = {name: values[row] for name, values in rows.items()}
        alone = sample(
            params, PROMPTS[one], LENGTHS[one], key=[7 + row], max_new_tokens_per_row=limit[one],
            stop_token_ids=stop[one], verifier=verifier, **settings,
        )  # fmt: skip
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert int(alone.finish[0]) == int(together.finish[row])
    model, _ = oracle.tiny_llama()
    assert together.tokens[0].tolist() == oracle.greedy_text(model, params, [3], 21)[1:]


def test_the_same_seed_writes_the_same_text_and_another_seed_another():
    _, params = oracle.tiny_llama()
    one, two = sample(params, temperature=1.0), sample(params, temperature=1.0)
    other = sample(params, temperature=1.0, key=[7, 80, 9])
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.tokens[0], other.tokens[0])
    assert one.tokens[1].tolist() != other.tokens[1].tolist()
    by_key = sample(params, temperature=1.0, key=jax.random.key(0))
    assert len({tuple(row) for row in by_key.tokens.tolist()}) == 3


def test_inside_a_larger_program_new_params_do_not_compile_again():
    model, params = oracle.tiny_llama()
    rows = policy.make(3, model.vocab_size, temperature=0.8)
    traces = []

    @jax.jit
    def reward(params, prompts, rows, key):
        traces.append(1)
        samples = sample(params, prompts, policy=rows, key=key, logprobs=True)
        return samples, samples.logprobs.processed.sum()

    first, _ = reward(params, PROMPTS, rows, jax.random.key(1))
    plain = sample(params, policy=rows, key=jax.random.key(1), logprobs=True)
    np.testing.assert_array_equal(first.tokens, plain.tokens)
    doubled = jax.tree.map(lambda x: 1.1 * x, params)
    second, _ = reward(doubled, PROMPTS + 1, rows._replace(top_k=jnp.array([3, 0, 1])), jax.random.key(2))
    assert len(traces) == 1 and second.tokens.tolist() != first.tokens.tolist()
    loop = make_decoder(model, DRAFTER, "token", chunk=8, logprobs=True)
    assert loop is make_decoder(model, DRAFTER, "token", chunk=8, logprobs=True)
    programs = loop.run._cache_size()
    sample(doubled, policy=rows, key=jax.random.key(3), logprobs=True)
    assert loop.run._cache_size() == programs


def test_logprobs_are_the_distribution_of_the_text_and_the_model_alone():
    model, params = oracle.tiny_llama()
    rows = dict(temperature=0.7, top_k=5, presence_penalty=0.5)
    draft, draft_params = oracle.tiny_llama(seed=1)
    drafter = draft_model(draft, 3)
    samples = sample(params, drafter=drafter, draft_params=draft_params, logprobs=True, **rows)
    settings, size = policy.make(1, oracle.VOCAB, **rows), PROMPTS.shape[1] + NEW

    @jax.jit
    def all_probs(tokens, at, start):
        """Log-probabilities of the token at a place: the model's, and the policy's."""
        hidden, _, _ = model.forward(params, model.init_cache(1, size + 8), tokens, tree.chain(1, size))
        logits = model.unembed(params, hidden[:, at - 1][:, None])
        history = History(tokens, at[None], start[None], jnp.array([[-1]]))
        logp = distribution.log_probs(settings, history, tokens[:, at - 1][:, None], tree.chain(1, 1), logits)
        token = tokens[0, at]
        return jax.nn.log_softmax(logits)[0, 0, token], logp[0, 0, token]

    for row, start in enumerate(LENGTHS.tolist()):
        text = PROMPTS[row, :start].tolist() + samples.tokens[row].tolist()
        tokens = jnp.array([text + [0] * (size - len(text))])
        for at in range(start, len(text)):
            raw, processed = all_probs(tokens, jnp.array(at), jnp.array(start))
            np.testing.assert_allclose(samples.logprobs.raw[row, at - start], raw, atol=1e-4)
            np.testing.assert_allclose(samples.logprobs.processed[row, at - start], processed, atol=1e-4)


def test_defaults_are_plain_sampling_of_whole_rows():
    model, params = oracle.tiny_llama()
    samples = jspec.speculative_sample(params, PROMPTS[1:2], target=model, key=[3], max_new_tokens=5)
    assert samples.tokens.shape == (1, 5) and samples.length.tolist() == [5]
    assert samples.logprobs is None and samples.stats.rounds.tolist() == [5]


def tree_drafter() -> Drafter:
    return Drafter(**{**DRAFTER.__dict__, "growth": "tree"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-0.5), r"temperature is -0.5; it must be finite and 0 \(greedy\) or more"),
        (dict(top_p=1.5), "top_p is 1.5; it must be more than 0 and at most 1"),
        (dict(min_p=[0.0, 2.0, 0.0]), "min_p is 2.0; it must be from 0"),
        (dict(top_k=-1), "top_k is -1; it must be an integer, 0"),
        (dict(logit_bias={99: 1.0}), "logit_bias names token 99; it must be an integer from 0 to 31"),
        (dict(banned=range(32)), "mask all 32 tokens"),
        (dict(verifier="magic"), "unknown verifier 'magic': choose one of token, block, coupled, greedy"),
        (
            dict(verifier="block", drafter=tree_drafter()),
            "judges drafts that grow as chain, not as tree",
        ),
        (dict(max_new_tokens=0), "max_new_tokens = 0 should be a whole number of at least 1"),
        (dict(key=[1]), "1 seeds were given for 3 rows"),
        (
            dict(prompts=jnp.zeros((3, 500), int), lengths=[1, 2, 400]),
            "prompt 2 has 400 tokens; the target's context holds 160",
        ),
        (dict(policy=policy.greedy(3, 32), top_k=2), "either a policy or its settings, not both: top_k"),
    ],
)
def test_bad_input_is_named_before_anything_is_compiled(options, message):
    _, params = oracle.tiny_llama()
    with pytest.raises(JspecError, match=message):
        sample(params, **options)
