"""Sliding windows as rings: across the wrap, to the last position, with drafts refused everywhere."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, tree
from jspec.cache import dense
from jspec.models.layers import attend, visible_slots
from jspec.sampling.drafters.draft_model import draft_model
from jspec.sampling.verifiers import greedy
from jspec.types import Proposal
from tests import oracle

SLOTS, WINDOW, K, CHUNK = 128, 5, 4, 8
RING = WINDOW - 1 + CHUNK
# about a window, a chunk and a turn of the ring
PROMPTS = [list(range(n)) for n in (1, 4, 5, 6, RING - 1, RING, RING + 1, 2 * RING + 1)]


@functools.cache
def wanted(context_length: int = 160, limit: int = 70) -> list[list[int]]:
    model, params = oracle.tiny_windowed(context_length=context_length)
    return [oracle.greedy_text(model, params, prompt, limit, slots=80) for prompt in PROMPTS]


def spoiled(texts: list[list[int]], every: int, offset: int) -> np.ndarray:
    script = np.array([text + [0] * (SLOTS - len(text)) for text in texts])
    if every:
        script[:, offset::every] = (script[:, offset::every] + 1) % oracle.VOCAB
    return script


@functools.cache
def scripted_decoder(every: int, offset: int, context_length: int = 160):
    model, params = oracle.tiny_windowed(context_length=context_length)
    script = spoiled(wanted(context_length), every, offset)
    return decode.make_decoder(model, oracle.scripted(script, K), greedy, chunk=CHUNK), model, params


@pytest.mark.parametrize(
    ("every", "offset"),
    [(2, 1), (5, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (3, 0)))],
)
def test_refused_drafts_leave_the_text_alone(every, offset):
    """Drafts refused after 0 to K right ones; each text goes round the ring five times."""
    decoder, model, params = scripted_decoder(every, offset)
    state = decoder.init(params, None, oracle.request(model, PROMPTS, SLOTS, 70))
    assert [entry.keys.shape[2] for entry in state.cache.layers] == [RING, SLOTS]
    state = decoder.run(params, None, state)
    assert oracle.texts(state) == wanted()
    oracle.assert_cache_is_prefill(model, params, state)


def test_rows_that_end_early_disturb_no_other():
    decoder, model, params = scripted_decoder(3, 0)
    limits = [70, 6, 30, 70, RING + 1, 70, 40, 55]
    state = decoder.init(params, None, oracle.request(model, PROMPTS, SLOTS, limits))
    state = decoder.run(params, None, state)
    assert oracle.texts(state) == [text[:limit] for text, limit in zip(wanted(), limits, strict=True)]
    oracle.assert_cache_is_prefill(model, params, state)


def test_the_last_position():
    """The context ends at 40: nothing is emitted beyond it, whatever the limit says."""
    decoder, model, params = scripted_decoder(3, 1, 40)
    state = decoder.init(params, None, oracle.request(model, PROMPTS, SLOTS, 500))
    state = decoder.run(params, None, state)
    assert oracle.texts(state) == wanted(40) and set(state.length.tolist()) == {40}


def test_a_ring_that_is_one_slot_short_is_seen(monkeypatch):
    """Mutant: what a refused draft overwrites is still needed."""
    ring_slots = dense.ring_slots
    monkeypatch.setattr(dense, "ring_slots", lambda *a: ring_slots(*a) - (a[1] is not None))
    model, params = oracle.tiny_windowed()
    script = spoiled(wanted(), 1, 0)
    loop = decode.make_decoder(model, oracle.scripted(script, K), greedy, chunk=K + 1)
    state = loop.init(params, None, oracle.request(model, PROMPTS, SLOTS, 70))
    assert oracle.texts(loop.run(params, None, state)) != wanted()


@pytest.mark.slow
def test_a_draft_model_with_windows_is_its_target():
    """It scribbles over its ring and absorbs: every draft is still accepted."""
    model, params = oracle.tiny_windowed()
    for k in (3, 7):
        decoder = decode.make_decoder(model, draft_model(model, k), greedy, chunk=4)
        state = decoder.init(params, params, oracle.request(model, PROMPTS, SLOTS, 70))
        state = decoder.run(params, params, state)
        assert oracle.texts(state) == wanted()
        np.testing.assert_array_equal(state.stats.accepted, state.stats.proposed)
        oracle.assert_cache_is_prefill(model, params, state._replace(cache=state.draft.cache))


@pytest.mark.parametrize("tiny", oracle.TINY.values(), ids=oracle.TINY)
def test_rounds_of_trees_copy_no_cache(tiny):
    """Committing a path gathers from the cache and writes it, ring or not, in place."""
    model, params = tiny()
    decoder = decode.make_decoder(model, oracle.scripted(np.zeros((2, SLOTS)), 4), greedy, chunk=CHUNK)
    state = decoder.init(params, None, oracle.request(model, [[1], [2, 3]], SLOTS, 60))
    layout = tree.from_parents(jnp.tile(jnp.array([-1, 0, 0, 1, 2]), (2, 1)))
    proposal = Proposal(jnp.zeros((2, 5), int), layout, jnp.full((2,), 5))

    def rounds(params, state):
        return jax.lax.fori_loop(0, 5, lambda _, s: decoder.advance(params, None, s, proposal)[0], state)

    text = jax.jit(rounds, donate_argnums=1).lower(params, state).compile().as_text()
    for entry in state.cache.layers:
        shape = ",".join(map(str, entry.keys.shape))
        assert f"f32[{shape}]" in text and not re.search(rf"= f32\[{shape}\]\S* copy\(", text)


def random_tree(rng, batch: int, nodes: int):
    parent = [[-1] + [int(rng.integers(0, i)) for i in range(1, nodes)] for _ in range(batch)]
    return tree.from_parents(jnp.array(parent))


@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
def test_visible_slots_are_those_of_a_search(branching):
    """Against what a ring holds when entries are written into it one by one."""
    rng = np.random.default_rng(0)
    for window, rows, slots in [(3, 1, 4), (3, 5, 7), (5, 4, 8), (8, 4, 30), (1, 6, 6), (2, 7, 9)]:
        length = rng.integers(0, 3 * slots, size=40) if slots < 30 else rng.integers(0, 26, size=40)
        layout = random_tree(rng, 40, rows) if branching else tree.chain(40, rows)
        depth = np.asarray(layout.depth)
        mask = np.tril(np.ones((40, rows, rows), bool)) if layout.mask is None else np.asarray(layout.mask)
        got = visible_slots(jnp.array(length), rows, slots, layout.mask, window, layout.depth)
        for row, n in enumerate(length):
            holds = {p % slots: p for p in range(n + rows)}
            for node in range(rows):
                own = n + depth[row, node]
                seen = set()
                for slot, index in holds.items():
                    scratch = index - n
                    position = index if scratch < 0 else n + depth[row, scratch]
                    if position > own - window and (scratch < 0 or mask[row, node, scratch]):
                        seen.add(slot)
                assert set(np.flatnonzero(got[row, node])) == seen


def test_attention_without_a_window_is_untouched_by_depth_and_cap_is_a_tanh():
    rng = np.random.default_rng(0)
    query = jnp.array(rng.standard_normal((1, 2, 2, 4)), jnp.float32) * 5
    keys = jnp.array(rng.standard_normal((1, 1, 6, 4)), jnp.float32)
    length = jnp.array([3])
    plain = attend(query, keys, keys, length, None, 1.0)
    wide = attend(query, keys, keys, length, None, 1.0, window=9)
    np.testing.assert_allclose(plain, wide, rtol=1e-6)
    scores = jnp.einsum("bthc,bsc->bhts", query, keys[:, 0])
    seen = jnp.arange(6) <= 3 + jnp.arange(2)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, 2 * jnp.tanh(scores / 2), -jnp.inf), axis=-1)
    capped = attend(query, keys, keys, length, None, 1.0, softcap=2.0)
    np.testing.assert_allclose(capped, jnp.einsum("bhts,bsc->bthc", weights, keys[:, 0]), rtol=1e-5)


def test_a_pass_wider_than_the_ring_is_refused():
    model, params = oracle.tiny_windowed()
    cache = model.init_cache(1, SLOTS, scratch=4)
    with pytest.raises(ValueError, match="a pass of 9 rows does not fit a ring of 8 slots"):
        model.forward(params, cache, jnp.zeros((1, 9), int), tree.chain(1, 9))
