"""The loop: limits, stops, errors, resuming, one program, nothing copied, nothing read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, rounds, tree
from jspec.cache import dense
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.sampling.verifiers import greedy
from jspec.serve import stream as host_loop
from jspec.serve.stream import Clock, fetch, stream
from jspec.types import ERROR, LENGTH, STOP, Model, Proposal, Verifier
from tests import oracle

slow = pytest.mark.slow

SLOTS = 128


@functools.cache
def perfect(prompt, limit, k, spoil=None, context_length=160):
    """A decoder on the tiny Llama whose drafter knows the text, with every ``spoil``-th token wrong."""
    model, params = oracle.tiny_llama(context_length=context_length)
    text = oracle.greedy_text(model, params, prompt, limit)
    script = np.array(text + [0] * (SLOTS - len(text)))
    if spoil:
        script[::spoil] = (script[::spoil] + 1) % oracle.VOCAB
    drafter = oracle.scripted(script[None], k)
    return decode.make_decoder(model, drafter, greedy, chunk=8), params, text


def start(decoder, params, prompts, limits, stops=(), model=None):
    model = model or oracle.tiny_llama()[0]
    return decoder.init(params, None, oracle.request(model, prompts, SLOTS, limits, stops))


def test_a_perfect_draft_gives_k_plus_one_tokens_a_pass():
    decoder, params, text = perfect((1, 2, 3), 63, 4)
    state = decoder.run(params, None, start(decoder, params, [[1, 2, 3]], [63]))
    assert oracle.texts(state) == [text]
    assert state.stats.rounds.tolist() == [12]  # 60 tokens, 5 a pass
    assert state.stats.accepted.tolist() == [[12] * 4]


@pytest.mark.parametrize("spoil", [3, pytest.param(2, marks=slow), pytest.param(5, marks=slow)])
def test_wrong_drafts_change_nothing_but_the_speed(spoil):
    decoder, params, text = perfect((1, 2, 3), 63, 4, spoil)
    state = decoder.run(params, None, start(decoder, params, [[1, 2, 3]], [63]))
    assert oracle.texts(state) == [text]
    assert 12 < state.stats.rounds[0] < 60


def stopped_inside_a_round():
    """A text that a stop token ends among accepted drafts: the state, and what was emitted."""
    decoder, params, text = perfect((1, 2, 3), 63, 4)
    where = next(i for i in range(5, 60) if text.index(text[i], 3) == i and i % 5 in (0, 4))
    state = decoder.run(params, None, start(decoder, params, [[1, 2, 3]], [63], [(text[where],)]))
    assert oracle.texts(state) == [text[: where + 1]]
    assert state.finish.tolist() == [STOP]
    return state, where + 1 - 3


def counts_end_with_the_text(state, emitted) -> bool:
    """Of the emitted tokens each full round of five ends with one of the target's own."""
    accepted, proposed = int(state.stats.accepted.sum()), int(state.stats.proposed.sum())
    return accepted == proposed == emitted - emitted // 5


def test_nothing_is_emitted_or_counted_after_a_stop_token():
    state, emitted = stopped_inside_a_round()
    assert counts_end_with_the_text(state, emitted)
    assert int(state.stats.rounds[0]) == -(-emitted // 5)


def test_counting_past_a_stop_token_is_seen(monkeypatch):
    """Mutant: the drafts that were accepted behind the stop token are counted."""
    depths = rounds._depths

    def uncut(proposal, verdict, count, depth):
        return depths(proposal, verdict, verdict.accepted + verdict.ok, depth)

    monkeypatch.setattr(rounds, "_depths", uncut)
    perfect.cache_clear()
    state, emitted = stopped_inside_a_round()
    perfect.cache_clear()
    assert not counts_end_with_the_text(state, emitted)


def test_the_context_ends_at_its_last_position():
    """Neither emitted tokens nor proposals go past the end, whatever the limit says."""
    decoder, params, text = perfect((1, 2, 3), 500, 4, context_length=20)
    state = start(decoder, params, [[1, 2, 3]], [500])
    proposed = []
    for state, info in stream(decoder, params, None, state):
        proposed.append(int(info.proposed[0]))
    assert len(text) == 20 and oracle.texts(state) == [text]
    assert state.finish.tolist() == [LENGTH]
    assert sum(proposed) + len(proposed) == 17 and int(state.cache.length[0]) == 19


def test_a_prompt_that_fills_the_context_or_its_limit_writes_nothing():
    decoder, params, _ = perfect((1, 2, 3), 500, 4, context_length=20)
    prompts = [list(range(20)), [1, 2, 3]]
    state = decoder.run(params, None, start(decoder, params, prompts, [500, 3]))
    assert oracle.texts(state) == prompts
    assert state.finish.tolist() == [LENGTH, LENGTH] and state.stats.rounds.tolist() == [0, 0]


@pytest.mark.parametrize("drafter", [none(), ngram(3, min_ngram=1)], ids=["none", "ngram"])
def test_run_is_stream_with_and_without_a_clock(drafter):
    model, params = oracle.tiny_llama()
    decoder = decode.make_decoder(model, drafter, greedy, chunk=8)
    prompts, limits = [[1], [4, 9, 2] * 5], [30, 40]
    ran = decoder.run(params, None, start(decoder, params, prompts, limits))
    for clock in (None, Clock()):
        rows, state = [list(p) for p in prompts], start(decoder, params, prompts, limits)
        accepted = np.zeros(2, int)
        for state, info in stream(decoder, params, None, state, clock):
            accepted += info.accepted
            for row, tokens, count in zip(rows, info.tokens, info.count, strict=True):
                row += tokens[:count].tolist()
        assert rows == oracle.texts(ran) == oracle.texts(state)
        assert jax.tree.all(jax.tree.map(np.array_equal, state.stats, ran.stats))
        assert accepted.tolist() == ran.stats.accepted.sum(axis=1).tolist()
    assert clock.verify > 0 and clock.draft > 0


def test_a_saved_state_resumes_with_the_same_text(tmp_path):
    model, params = oracle.tiny_llama()
    decoder = decode.make_decoder(model, ngram(3, min_ngram=1), greedy, chunk=8)
    prompts, limits = [[1], [4, 9, 2] * 5], [30, 40]
    whole = decoder.run(params, None, start(decoder, params, prompts, limits))
    state = start(decoder, params, prompts, limits)
    for _ in range(3):
        state, _ = decoder.step(params, None, state)
    leaves, structure = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as saved:
        loaded = jax.tree.unflatten(structure, [jnp.asarray(saved[name]) for name in saved.files])
    resumed = decoder.run(params, None, loaded)
    assert oracle.texts(resumed) == oracle.texts(whole)
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed.stats, whole.stats))


MODELS = {**oracle.TINY, "table": oracle.random_table}


@pytest.mark.parametrize(
    ("make", "branching"),
    [
        pytest.param(MODELS[name], branching, id=f"{name}-{'tree' if branching else 'chain'}", marks=marks)
        for name, branching, marks in (
            ("llama", True, ()), ("windowed", False, ()), ("llama", False, slow), ("windowed", True, slow),
            ("table", False, slow), ("table", True, slow))
    ],
)  # fmt: skip
def test_cache_after_random_rounds_is_a_fresh_prefill(make, branching):
    """Drafts accepted to every length, in chains and in trees, leave no trace of the refused ones."""
    model, params = make()
    rng = np.random.default_rng(0)
    prompts, limit, nodes = [[1], [4, 3, 2] * 5], 60, 7
    wanted = [oracle.greedy_text(model, params, p, limit) for p in prompts]
    decoder = decode.make_decoder(model, oracle.scripted(np.zeros((2, SLOTS)), nodes - 1), greedy, chunk=8)
    state = start(decoder, params, prompts, [limit] * 2, (), model)
    parent = [-1, 0, 0, 1, 2, 4, 5] if branching else list(range(-1, nodes - 1))
    layout = tree.from_parents(jnp.tile(jnp.array(parent), (2, 1))) if branching else tree.chain(2, nodes)
    lengths_seen = set()
    for _ in range(14):
        tokens = np.zeros((2, nodes), int)
        for row in range(2):
            at, upto = int(state.length[row]) - 1, rng.integers(0, nodes)
            right = (wanted[row] + [0] * nodes)[at : at + nodes]
            for node in range(nodes):
                depth = int(layout.depth[row, node])
                # the true continuation runs down the second branch, wrong from some node on
                true_here = node < upto and (not branching or node in (0, 2, 4, 5, 6))
                tokens[row, node] = right[depth] if true_here or node == 0 else (right[depth] + 1) % 5
        proposal = Proposal(jnp.array(tokens), layout, jnp.full((2,), nodes))
        state, info = decoder.advance(params, None, state, proposal)
        lengths_seen |= set(info.accepted.tolist())
        oracle.assert_cache_is_prefill(model, params, state)
    assert lengths_seen >= {0, 1, 2, 3}
    for text, full in zip(oracle.texts(state), wanted, strict=True):
        assert text == full[: len(text)] and len(text) > 15


def test_a_distribution_that_is_no_distribution_ends_its_row_and_no_other():
    model, params = oracle.cycle_table(5)
    params = params.at[3].set(jnp.nan)  # what follows a 3 is undefined
    decoder = decode.make_decoder(model, oracle.scripted(np.arange(SLOTS)[None] % 5, 4), greedy, chunk=8)
    state = start(decoder, params, [[0], [4]], [30, 30], [(), (2,)], model)
    state = decoder.run(params, None, state)
    assert oracle.texts(state) == [[0, 1, 2, 3], [4, 0, 1, 2]]  # accepted drafts before it stand
    assert state.finish.tolist() == [ERROR, STOP]


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf])
def test_infinite_and_empty_distributions_are_errors_too(bad):
    model, params = oracle.cycle_table(5)
    decoder = decode.make_decoder(model, none(), greedy)
    state = start(decoder, params.at[1].set(bad), [[0]], [30], (), model)
    assert decoder.run(params.at[1].set(bad), None, state).finish.tolist() == [ERROR]


def test_one_program_serves_all_requests_of_a_shape():
    model, params = oracle.tiny_llama()
    decoder = decode.make_decoder(model, ngram(3), greedy, chunk=8)
    for prompts, limits, stops in [
        ([[1], [2, 3]], [20, 30], [(), ()]),
        ([list(range(30)), [7]], [50, 9], [(4,), (1, 2)]),
    ]:
        decoder.run(params, None, start(decoder, params, prompts, limits, stops))
        doubled = jax.tree.map(lambda x: 2 * x, params)
        decoder.run(doubled, None, start(decoder, doubled, prompts, limits, stops))
    assert decoder.run._cache_size() == 1


def test_a_generation_reads_the_device_once():
    model, params = oracle.tiny_llama()
    decoder = decode.make_decoder(model, ngram(3), greedy, chunk=8)
    before = host_loop.host_reads
    state = decoder.run(params, None, start(decoder, params, [[1, 2]], [40]))
    assert host_loop.host_reads == before
    fetch((state.tokens, state.length, state.finish, state.stats))
    assert host_loop.host_reads == before + 1


def test_a_round_without_a_proposal_costs_a_one_row_pass():
    """Counted in the running program: how many rows every executed pass had."""
    model, params = oracle.tiny_llama()
    rows = []

    def forward(params, cache, tokens, layout):
        jax.debug.callback(lambda: rows.append(tokens.shape[1]))
        return model.forward(params, cache, tokens, layout)

    counting = Model(**{**model.__dict__, "forward": forward})
    decoder = decode.make_decoder(counting, ngram(3, min_ngram=2), greedy, chunk=8)
    state = decoder.run(params, None, start(decoder, params, [[1, 2, 3, 4]], [60]))
    jax.effects_barrier()
    drafting = int(state.stats.proposed[0, 0])
    assert rows == [8] + [r for r in rows[1:] if r in (1, 4)]  # one chunk of prompt
    assert rows.count(4) == drafting and rows.count(1) == int(state.stats.rounds[0]) - drafting > 0


def test_a_one_token_prompt_runs_no_prefill_pass():
    model, params = oracle.tiny_llama()
    ran = []

    def forward(params, cache, tokens, layout):
        jax.debug.callback(lambda: ran.append(1))
        return model.forward(params, cache, tokens, layout)

    decoder = decode.make_decoder(Model(**{**model.__dict__, "forward": forward}), none(), greedy)
    start(decoder, params, [[5]], [60])
    jax.effects_barrier()
    assert not ran


def cache_copies(decoder, params, state) -> int:
    text = decoder.run.lower(params, None, state).compile().as_text()
    count = 0
    for shape in {",".join(map(str, entry.keys.shape)) for entry in state.cache.layers}:
        assert f"f32[{shape}]" in text
        count += len(re.findall(rf"= f32\[{shape}\]\S* copy\(", text))
    return count


@pytest.mark.parametrize(
    ("tiny", "drafter", "batch"),
    [
        pytest.param(oracle.TINY[name], drafter, batch, id=f"{name}-{drafter.nodes}-{batch}", marks=marks)
        for name, drafter, batch, marks in (
            ("llama", ngram(4), 3, ()), ("windowed", ngram(4), 1, ()), ("llama", none(), 1, ()),
            ("llama", ngram(4), 1, slow), ("llama", none(), 3, slow), ("windowed", ngram(4), 3, slow),
            ("windowed", none(), 1, slow), ("windowed", none(), 3, slow))
    ],
)  # fmt: skip
def test_the_compiled_loop_copies_no_cache(tiny, drafter, batch):
    model, params = tiny()
    decoder = decode.make_decoder(model, drafter, greedy, chunk=8)
    state = start(decoder, params, [[1, 2]] * batch, [40] * batch, (), model)
    assert cache_copies(decoder, params, state) == 0
    aliased = decoder.run.lower(params, None, state).compile().memory_analysis().alias_size_in_bytes
    assert aliased >= sum(x.nbytes for x in jax.tree.leaves(state.cache))


def test_the_copy_count_sees_a_copy(monkeypatch):
    """Mutant: the obvious in-place write, which XLA fuses into its readers and copies for each."""

    def put(buffer, rows, start, wrap):
        def one(buffer, rows, start):
            return jax.lax.dynamic_update_slice(buffer, rows.swapaxes(0, 1), (0, start, 0))

        return jax.vmap(one)(buffer, rows, start)

    monkeypatch.setattr(dense, "_put", put)
    model, params = oracle.tiny_llama()
    decoder = decode.make_decoder(model, none(), greedy, chunk=8)
    assert cache_copies(decoder, params, start(decoder, params, [[1, 2]], [40])) > 0


MUTANTS = {
    "accepts everything": Verifier("", lambda prop, probs: jnp.ones(probs.shape[0]), greedy.residual),
    "looks at its own row": Verifier(
        "", lambda prop, probs: (prop.tokens == probs.argmax(-1)).astype(probs.dtype), greedy.residual
    ),
    "continues from the root": Verifier("", greedy.accept, lambda prop, probs, node: probs[0]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_do_not_write_the_target_text(name):
    _, params, text = perfect((1, 2, 3), 63, 4, 3)
    model, _ = oracle.tiny_llama()
    script = np.array(text + [0] * SLOTS)
    script[::3] = (script[::3] + 1) % oracle.VOCAB
    decoder = decode.make_decoder(model, oracle.scripted(script[None], 4), MUTANTS[name], chunk=8)
    state = decoder.run(params, None, start(decoder, params, [[1, 2, 3]], [63]))
    assert oracle.texts(state) != [text]
