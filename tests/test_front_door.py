"""What a caller of `speculative_sample` may rely on: one program for equal settings, nothing given
away twice, and every argument checked where it is concrete."""

import gc
import weakref
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import drafters, once
from jspec.errors import JspecError
from jspec.models import table
from jspec.sampling import policy
from tests import oracle
from tests.sampling.drafters.cases import CASES, FIVE_TOKENS

quick, slow = pytest.mark.quick, pytest.mark.slow
LOGITS = jnp.log(jnp.array([[0.4, 0.6], [0.4, 0.6], [0.4, 0.6]]))
PROMPTS = jnp.array([[0, 1, 0], [1, 0, 0]])


def sample(params=LOGITS, prompts=PROMPTS, **options):
    options = dict(target=table.make(2), key=[1, 2], max_new_tokens=4, chunk=4) | options
    return jspec.speculative_sample(params, prompts, **options)


@contextmanager
def counted():
    """A list with an entry for each program that is compiled inside the block."""
    compiled: list[str] = []
    inside = [True]

    def listen(event: str, duration: float, **rest) -> None:
        if inside and event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        inside.clear()


def test_compilations_are_counted():
    with counted() as compiled:
        jax.jit(lambda x: x * 3 + len(compiled))(jnp.arange(17))
    assert compiled


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=slow if case.head or case.variant else quick if case.name == "none" else (),
        )
        for case in CASES
    ],
)
def test_a_second_call_with_equal_settings_compiles_nothing(case):
    """Also where the drafter is written in the call, so that its builder runs again."""
    prompts = jnp.array([[0, 1, 2], [3, 4, 0]])

    def call(seed):
        rig = case.rig(FIVE_TOKENS)
        return jspec.speculative_sample(
            rig.params, prompts, target=rig.target, drafter=rig.drafter, draft_params=rig.draft_params,
            key=[seed, 2], max_new_tokens=6, chunk=4, temperature=[0.5, 1.0],
        )  # fmt: skip

    call(1)
    with counted() as compiled:
        call(2).tokens.block_until_ready()
    assert not compiled


def test_without_a_drafter_and_with_what_was_left_out_before():
    sample()
    lengths, more = jnp.array([3, 3]), jnp.array([2, 3])
    with counted() as compiled:
        sample(drafter=drafters.none(), verifier="token", prompt_length=[2, 3], max_new_tokens_per_row=[1, 4])
        sample(prompt_length=lengths, max_new_tokens_per_row=more, temperature=0.5)
    assert not compiled


def test_equal_settings_are_one_object():
    assert drafters.ngram(4) is drafters.ngram(4, min_ngram=3) is drafters.ngram(num_speculative_tokens=4)
    assert drafters.ngram(4) is not drafters.ngram(5)
    assert oracle.llama.make(oracle.CONFIG) is oracle.llama.make(oracle.CONFIG, feature_layers=())
    assert jspec.verifiers.simulated_lossy([0.5, 0.2]) is jspec.verifiers.simulated_lossy((0.5, 0.2))


def test_a_decoder_that_nobody_holds_is_let_go():
    decoder = weakref.ref(jspec.make_decoder(table.make(3), drafters.ngram(2), chunk=5))
    once.forget()
    jax.clear_caches()
    gc.collect()
    assert decoder() is None


def test_a_policy_and_a_request_may_be_used_again():
    rows = policy.make(2, 2, temperature=0.7)
    one, two = sample(policy=rows), sample(policy=rows)
    assert one.tokens.tolist() == two.tokens.tolist() and rows.bias.sum() == 0
    decoder = jspec.make_decoder(table.make(2), drafters.ngram(2), chunk=4, logprobs=True)
    request = jspec.make_request(decoder, PROMPTS, key=[1, 2], max_new_tokens=4, policy=rows)
    texts = [decoder.run(LOGITS, None, decoder.init(LOGITS, None, request)).tokens for _ in range(2)]
    assert texts[0].tolist() == texts[1].tolist() and request.length.tolist() == [3, 3]


def test_called_eagerly_under_grad():
    """The sampled tokens have no gradient; what is computed from them has."""

    def loss(logits):
        samples = sample(logits, drafter=drafters.ngram(2, min_ngram=1), logprobs=True)
        return jnp.sum(jax.nn.log_softmax(logits)[0, samples.tokens])

    gradient = jax.grad(loss)(LOGITS)
    assert np.isfinite(gradient).all() and (gradient[0] != 0).any()


@pytest.mark.quick
def test_the_greedy_verifier_is_refused_above_temperature_0():
    for temperature in (1.0, [0.0, 0.3]):
        with pytest.raises(JspecError, match="'greedy' is for temperature 0, not for"):
            sample(verifier="greedy", temperature=temperature)
    with pytest.raises(JspecError, match="the temperature is traced"):
        rows = policy.make(2, 2, temperature=0)
        jax.jit(lambda rows: sample(verifier="greedy", policy=rows))(rows)
    assert sample(verifier="greedy", temperature=0).tokens.tolist() == sample(temperature=0).tokens.tolist()
    decoder = jspec.make_decoder(table.make(2), drafters.none(), "greedy", chunk=4)
    with pytest.raises(JspecError, match="for temperature 0"):
        decoder.init(LOGITS, None, jspec.make_request(decoder, PROMPTS, key=[1, 2], max_new_tokens=4))


BAD = [
    (dict(chunk=0), "chunk = 0 should be a whole number of at least 1"),
    (dict(chunk=True), "chunk = True"),
    (dict(prompt_length=[0, 2]), "prompt_length is 0 for row 0; it must be from 1 to 3"),
    (dict(prompt_length=[2, 4]), "prompt_length is 4 for row 1; it must be from 1 to 3"),
    (dict(prompt_length=[2]), r"prompt_length is int\d+\[1\]; it must be one integer for each of 2 rows"),
    (dict(prompt_length=[1.5, 2.0]), "prompt_length is float"),
    (dict(max_new_tokens=0), "max_new_tokens = 0"),
    (dict(max_new_tokens_per_row=[1]), "max_new_tokens_per_row is int"),
    (dict(max_new_tokens_per_row=[1, -2]), "max_new_tokens_per_row is -2 for row 1"),
    (dict(key=7), "key is 7; it must be jax.random.key"),
    (dict(key=[0.5, 1]), "seeds .* should be integers"),
    (dict(key=jnp.array([1, 2])), "a key must be one jax.random.key"),
    (dict(stop_token_ids=3), r"stop_token_ids is int\d+\[\]; it must hold token ids"),
    (dict(stop_token_ids=[[1], [0], [1]]), "stop_token_ids is int"),
    (dict(policy=policy.make(1, 2)), r"policy.temperature has the shape \[1\]; it must be \[2\]"),
    (dict(policy=policy.make(2, 3)), r"policy.bias has the shape \[2, 3\]; it must be \[2, 2\]"),
    (dict(topp=0.5), "unknown sampling setting 'topp'; did you mean 'top_p'"),
    (dict(prompts=jnp.array([1, 2])), r"prompt_tokens is int32\[2\]; it must hold integers \[B, prompt\]"),
    (dict(prompts=jnp.ones((2, 2))), "prompt_tokens is float32"),
    (dict(prompts=7), "prompt_tokens is 7"),
    (dict(prompts=[[1], []]), "prompt 1 is"),
    (dict(prompts=[[1], [1, 0]], prompt_length=[1, 1]), "prompt_length is for an array of prompts"),
    (dict(verifier="magic"), "unknown verifier 'magic'"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_is_wrong_is_said(options, message):
    with pytest.raises(JspecError, match=message):
        sample(**options)


def test_what_people_have_is_taken():
    """Lists, NumPy arrays and seeds of NumPy, prompts of any lengths, stop ids for all rows."""
    plain = sample(prompt_length=[2, 3], stop_token_ids=[[1], [1]], max_new_tokens_per_row=[3, 4])
    for options in (
        dict(prompts=np.asarray(PROMPTS), prompt_length=np.array([2, 3]), key=np.array([1, 2])),
        dict(prompts=[[0, 1], [1, 0, 0]], key=[np.int64(1), np.uint8(2)]),
    ):
        other = sample(stop_token_ids=[1], max_new_tokens_per_row=np.array([3, 4]), **options)
        assert other.tokens.tolist() == plain.tokens.tolist()
        assert other.length.tolist() == plain.length.tolist()


def test_padding_may_be_wider_than_the_context():
    target = table.make(2, context_length=8)
    prompts = jnp.zeros((2, 20), jnp.int32)
    samples = sample(prompts=prompts, target=target, prompt_length=[2, 6], max_new_tokens=4)
    assert samples.length.tolist() == [4, 2]
    with pytest.raises(JspecError, match="prompt 1 has 9 tokens; the target's context holds 8"):
        sample(prompts=prompts, target=target, prompt_length=[2, 9])
    traced = jax.jit(lambda n: sample(prompts=prompts, target=target, prompt_length=n).length)
    assert traced(jnp.array([2, 9])).tolist() == [4, 0]


def test_a_request_with_too_few_slots_is_noticed():
    decoder = jspec.make_decoder(table.make(2), drafters.ngram(6), chunk=4)
    request = jspec.make_request(decoder, PROMPTS, key=[1, 2], max_new_tokens=4)
    short = request._replace(tokens=request.tokens[:, :12])
    with pytest.raises(JspecError, match="the request has 12 slots and needs 14"):
        decoder.init(LOGITS, None, short)
    with pytest.raises(JspecError, match="row 1 of the request has no prompt"):
        decoder.init(LOGITS, None, request._replace(length=jnp.array([2, 0])))
