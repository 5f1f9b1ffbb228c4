"""What the target's and the head's caches hold after rounds of trees: a fresh pass over the text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, tree
from jspec.sampling.verifiers import greedy
from tests import oracle
from tests.sampling.drafters import rigged
from tests.sampling.drafters.cases import BY_CASE, TRANSFORMERS

SLOTS, PROMPTS, LIMIT = 96, [[3], [5, 6], [4, 9, 2] * 4], 44
HELP = jnp.array([2, 0, 3, 1, 1, 3, 2, 0, 1, 2, 3])  # how deep, by position


@functools.cache
def script(tiny) -> jax.Array:
    """What the target writes."""
    model, params = tiny()
    texts = [oracle.greedy_text(model, params, prompt, LIMIT, slots=48) for prompt in PROMPTS]
    return jnp.array([text + [0] * (SLOTS - len(text)) for text in texts])


def helped(drafter, right):
    """Random heads are hardly ever right: the last path gets the right tokens, down to some depth."""

    def propose(params, state, root, context):
        proposal, state = drafter.propose(params, state, root, context)
        depth, row = proposal.tree.depth, jnp.arange(root.shape[0])
        leaf = depth.shape[1] - 1 - jnp.argmax(depth[:, ::-1], axis=1)
        good = HELP[(context.position + 3 * row) % len(HELP)]
        on_path = proposal.tree.mask[row, leaf] & (depth > 0) & (depth <= good[:, None])
        known = jnp.take_along_axis(right, context.position[:, None] + depth, axis=1)
        tokens = jnp.where(on_path, known, proposal.tokens).astype(proposal.tokens.dtype)
        return proposal._replace(tokens=tokens, logq=None), state

    return dataclasses.replace(drafter, propose=propose)


def assert_close(got, wanted) -> None:
    """Up to rounding, which grows with the largest number summed over: random heads' logits reach 40."""
    atol = 1e-4 * max(1.0, float(jnp.abs(wanted).max(initial=0.0)))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=atol)


def assert_head_is_fresh(head, draft_params, features, state) -> None:
    """Its rows are those of the target's own features with the tokens one place on."""
    batch, slots = state.tokens.shape
    length = np.asarray(state.draft.cache.length)
    np.testing.assert_array_equal(length, np.asarray(state.length) - 1)

    @jax.jit
    def over_again(draft_params, tokens, features):
        stream, empty = head.fuse(draft_params, features), head.init_cache(batch, slots)
        return head.forward(draft_params, empty, tokens, stream, tree.chain(batch, slots))

    hidden, out, fresh = over_again(draft_params, jnp.roll(state.tokens, -1, axis=1), features)
    for got, wanted in zip(
        jax.tree.leaves(state.draft.cache.layers), jax.tree.leaves(fresh.layers), strict=True
    ):
        for row, n in enumerate(length):
            assert_close(got[row, :, :n], wanted[row, :, :n])
    rows = jnp.arange(batch)
    assert_close(state.draft.stream, out[rows, length - 1])
    assert_close(state.draft.logits, head.unembed(draft_params, hidden)[rows, length - 1])


@pytest.mark.parametrize(
    ("name", "tiny"),
    [
        ("eagle_static", "windowed"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("eagle_static", "llama"), ("eagle_dynamic", "llama"), ("eagle_dynamic", "windowed"),
            ("eagle3_dynamic", "llama"),
            ("eagle3_dynamic", "windowed"), ("medusa_static", "windowed"))),
    ],
)  # fmt: skip
def test_after_rounds_that_keep_some_of_a_tree(name, tiny):
    make, case = oracle.TINY[tiny], BY_CASE[name]
    model, params, drafter, draft_params = case.rig(TRANSFORMERS[tiny])
    decoder = decode.make_decoder(model, helped(drafter, script(make)), greedy, chunk=8)
    state = decoder.init(params, draft_params, oracle.request(model, PROMPTS, SLOTS, LIMIT))
    accepted = []
    for _ in range(9):
        state, info = decoder.step(params, draft_params, state)
        accepted += info.accepted.tolist()
    assert set(accepted) >= {0, 1, 2, 3}
    for text, right in zip(oracle.texts(state), script(make).tolist(), strict=True):
        assert text == right[: len(text)]
    oracle.assert_cache_is_prefill(model, params, state)
    if case.head != "medusa":
        layout = tree.chain(*state.tokens.shape)
        cache = model.init_cache(len(PROMPTS), SLOTS)
        features = jax.jit(model.forward)(params, cache, state.tokens, layout)[1]
        assert_head_is_fresh(rigged.random(case.head, params)[0], draft_params, features, state)
