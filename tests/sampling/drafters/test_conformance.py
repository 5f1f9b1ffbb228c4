"""Every drafter of the conformance list: lossless under greedy verification, and useful."""

import functools

import jax
import numpy as np
import pytest

from jspec import decode
from jspec.sampling.verify import greedy
from jspec.types import LENGTH, STOP
from tests import oracle
from tests.sampling.drafters import rigged
from tests.sampling.drafters.cases import CASES

CHUNK, SLOTS = 8, 128
# a one-token prompt beside ones of a chunk, just over one, and several
PROMPTS = [[3], [5, 6], list(range(8)), list(range(9)), [4, 9, 2] * 9]
LIMITS = [40, 2, 9, 60, 50]  # row 1 has nothing to write, row 2 one token


@functools.cache
def decoder_of(case, tiny=oracle.tiny_llama):
    model, params = tiny(taps=case.taps) if case.taps else tiny()
    drafter, dparams = case.make(model, params)
    return decode.make_decoder(model, drafter, greedy, chunk=CHUNK), model, params, dparams


@functools.cache
def expected(tiny, row, stop):
    model, params = tiny()
    return oracle.greedy_text(model, params, PROMPTS[row], max(LIMITS[row], len(PROMPTS[row])), stop)


def listed(*fast: str):
    """All cases; heads, whose loops take long to compile, are slow but for some."""
    return [marked(case, case.name in fast) for case in CASES]


def marked(case, fast: bool, *more, name: str = ""):
    marks = () if not case.head or fast else pytest.mark.slow
    return pytest.param(case, *more, marks=marks, id=case.name + name)


@pytest.mark.parametrize(
    ("case", "tiny"),
    [
        marked(case, (case.name, name) == ("medusa_tree", "windowed"), tiny, name=f"-{name}")
        for case in CASES
        for name, tiny in oracle.TINY.items()
    ],
)
def test_greedy_equals_the_oracle(case, tiny):
    """Ragged prompts, per-row limits and stop sets: each row is what plain decoding writes."""
    decoder, model, params, dparams = decoder_of(case, tiny)
    free = [expected(tiny, row, ()) for row in range(len(PROMPTS))]
    # stop on a token from inside each text, so that it falls inside an accepted run
    stops = [(), (), (), (free[3][25],), (free[4][33], free[4][40])]
    state = decoder.init(params, dparams, oracle.request(model, PROMPTS, SLOTS, LIMITS, stops))
    state = decoder.run(params, dparams, state)
    wanted = [expected(tiny, row, stops[row]) for row in range(len(PROMPTS))]
    assert oracle.texts(state) == wanted
    ended = [STOP if text[-1] in ids and ids else LENGTH for text, ids in zip(wanted, stops, strict=True)]
    assert np.asarray(state.finish).tolist() == ended


@pytest.mark.parametrize("case", listed())
def test_batch_of_b_is_b_batches_of_one(case):
    decoder, model, params, dparams = decoder_of(case)
    limits = [30, 12, 20, 31, 45]
    request = oracle.request(model, PROMPTS, SLOTS, limits)
    together = decoder.run(params, dparams, decoder.init(params, dparams, request))
    alone = []
    for row in range(len(PROMPTS)):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], request)
        alone += oracle.texts(decoder.run(params, dparams, decoder.init(params, dparams, one)))
    assert oracle.texts(together) == alone


@pytest.mark.parametrize("case", listed("eagle2"))
def test_floor_on_acceptance(case):
    """Lossless is not enough: an off-by-one in the shift accepts nothing and is still lossless."""
    decoder, model, params, dparams = decoder_of(case, rigged.target if case.taps else oracle.cycle_table)
    state = decoder.init(params, dparams, oracle.request(model, [[0, 1, 2, 3, 4] * 2 + [0]], SLOTS, 71))
    state = decoder.run(params, dparams, state)
    accepted, proposed = state.stats.accepted.sum(), state.stats.proposed.sum()
    assert accepted >= case.cycle_floor * proposed
    assert proposed > 0 or case.cycle_floor == 0
    per_pass = 60 / int(state.stats.rounds[0])
    deepest = state.stats.proposed.shape[1]
    assert per_pass == pytest.approx(deepest + 1 if case.cycle_floor == 1 else 1, rel=0.1)
