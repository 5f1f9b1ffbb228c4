"""Every drafter of the conformance list: lossless under greedy verification, and useful."""

import functools

import jax
import numpy as np
import pytest

from jspec import decode
from jspec.sampling.verifiers import greedy
from jspec.types import LENGTH, STOP
from tests import oracle
from tests.sampling.drafters.cases import CASES, CYCLE, TRANSFORMERS

CHUNK, SLOTS = 8, 128
# a one-token prompt beside ones of a chunk, just over one, and several
PROMPTS = [[3], [5, 6], list(range(8)), list(range(9)), [4, 9, 2] * 9]
LIMITS = [40, 2, 9, 60, 50]  # row 1 has nothing to write, row 2 one token


@functools.cache
def rig_of(case, world="llama"):
    rig = case.rig(TRANSFORMERS[world])
    return decode.make_decoder(rig.target, rig.drafter, greedy, chunk=CHUNK), rig


@functools.cache
def expected(world, row, stop):
    model, params = oracle.TINY[world]()
    return oracle.greedy_text(model, params, PROMPTS[row], max(LIMITS[row], len(PROMPTS[row])), stop)


def write(case, world, limits, stops=(), rows=slice(None)):
    decoder, rig = rig_of(case, world)
    request = oracle.request(rig.target, PROMPTS, SLOTS, limits, stops)
    request = jax.tree.map(lambda x: x[rows], request)
    return decoder.run(rig.params, rig.draft_params, decoder.init(rig.params, rig.draft_params, request))


def listed(*quick: str, default: tuple[str, ...] = (), few: bool = False):
    """All cases; variants, and heads, whose loops take long to compile, are slow but for some.

    ``few``: the rest are slow too.
    """
    return [marked(case, quick, default, few=few) for case in CASES]


def marked(case, quick=(), default=(), *more, name: str = "", few: bool = False):
    slow = (case.head or case.variant or few) and case.name not in (*quick, *default)
    marks = [pytest.mark.slow] if slow else [pytest.mark.quick] if case.name in quick else []
    return pytest.param(case, *more, marks=marks, id=case.name + name)


@pytest.mark.parametrize(
    ("case", "world"),
    [marked(case, ("ngram", "model", "bigram"), ("eagle_static",), "llama", name="-llama") for case in CASES]
    + [marked(case, (), ("medusa_static",), "windowed", name="-windowed") for case in CASES],
)
def test_greedy_equals_the_oracle(case, world):
    """Ragged prompts, per-row limits and stop sets: each row is what plain decoding writes."""
    free = [expected(world, row, ()) for row in range(len(PROMPTS))]
    # stop on a token from inside each text, so that it falls inside an accepted run
    stops = [(), (), (), (free[3][25],), (free[4][33], free[4][40])]
    state = write(case, world, LIMITS, stops)
    wanted = [expected(world, row, stops[row]) for row in range(len(PROMPTS))]
    assert oracle.texts(state) == wanted
    ended = [STOP if text[-1] in ids and ids else LENGTH for text, ids in zip(wanted, stops, strict=True)]
    assert np.asarray(state.finish).tolist() == ended


@pytest.mark.parametrize("case", listed(default=("ngram", "model"), few=True))
def test_batch_of_b_is_b_batches_of_one(case):
    limits = [30, 12, 20, 31, 45]
    together = oracle.texts(write(case, "llama", limits))
    alone = [oracle.texts(write(case, "llama", limits, rows=slice(row, row + 1)))[0] for row in range(5)]
    assert together == alone


@pytest.mark.parametrize("case", listed(default=("eagle_dynamic",)))
def test_floor_on_acceptance(case):
    """Lossless is not enough: an off-by-one in the shift accepts nothing and is still lossless."""
    rig = case.rig(CYCLE)
    decoder = decode.make_decoder(rig.target, rig.drafter, greedy, chunk=CHUNK)
    request = oracle.request(rig.target, [[0, 1, 2, 3, 4] * 2 + [0]], SLOTS, 71)
    state = decoder.run(rig.params, rig.draft_params, decoder.init(rig.params, rig.draft_params, request))
    accepted, proposed = state.stats.accepted.sum(), state.stats.proposed.sum()
    assert accepted >= case.floor * proposed
    assert proposed > 0 or case.floor == 0
    per_pass = 60 / int(state.stats.rounds[0])
    deepest = state.stats.proposed.shape[1]
    assert per_pass == pytest.approx(deepest + 1 if case.floor == 1 else 1, rel=0.1)


@pytest.mark.parametrize("case", listed("ngram", default=("model",), few=True))
def test_with_64_bits_enabled_the_text_is_the_same(case):
    """Counts and positions stay 32 bits wide: a loop's carry may not change its types."""
    rig = case.rig(TRANSFORMERS["llama"])
    wanted = oracle.texts(write(case, "llama", LIMITS))
    with jax.enable_x64(True):
        decoder = decode.make_decoder.__wrapped__(rig.target, rig.drafter, greedy, chunk=CHUNK, logprobs=True)
        request = oracle.request(rig.target, PROMPTS, SLOTS, LIMITS)
        state = decoder.run(rig.params, rig.draft_params, decoder.init(rig.params, rig.draft_params, request))
        assert oracle.texts(state) == wanted
