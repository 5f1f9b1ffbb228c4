"""The TPU form of verification attention against the plain one, interpreted with data races looked for."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode
from jspec.errors import JspecError
from jspec.models import decoder
from jspec.models.heads import eagle1
from jspec.pallas import compat
from jspec.pallas.attention import tpu
from jspec.pallas.attention.reference import attend_ref
from jspec.pallas.attention.tpu import attend_tpu
from jspec.sampling.drafters import eagle_dynamic
from jspec.sampling.verifiers import greedy
from tests import oracle
from tests.pallas.attention_cases import BLOCK, CASES, PRODUCT, Arrays, Case, arrays, options
from tests.pallas.wide import wide

SCALE = 0.4
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


pytestmark = pytest.mark.usefixtures("quick_compilation")


def kernel(*args, cores: int = 1, **options):
    interpret = compat.tpu_interpreter(cores=cores)
    return attend_tpu(*args, interpret=interpret, **{"block": BLOCK, **options})


def compare(case: Case, **settings) -> None:
    """With NaN in all slots that are neither committed nor scratch."""
    given, clean = (
        arrays(case),
        arrays(case, unseen=0.0),
    )  # the plain form multiplies what it does not see by 0

    @jax.jit
    def both(given: Arrays, clean: Arrays):
        wide = [x.astype(jnp.float32) for x in clean[:3]]
        want = attend_ref(*wide, *clean[3:5], SCALE, **options(case, clean))
        return kernel(*given[:5], SCALE, **options(case, given), **settings), want

    got, want = both(given, clean)
    assert got.dtype == case.dtype and got.shape == given.query.shape
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_plain_form(case):
    compare(case)


@pytest.mark.parametrize(
    ("name", "splits"), [("a later pass of a drafter", 1), ("a ring longer than its window", 3)]
)
def test_two_cores_and_splits_join_to_the_same(name, splits):
    (case,) = [case for case in CASES if case.name == name]
    compare(case, splits=splits, cores=2)


@pytest.mark.parametrize(
    "index", wide([(i,) for i in range(len(PRODUCT))]), ids=lambda index: PRODUCT[index].name
)
def test_product(index):
    compare(PRODUCT[index], splits=1 + index % 2, cores=2)


def test_many_rows_are_cut_into_tiles(monkeypatch):
    """A prompt: 20 rows x 3 heads in tiles of 32 rows, the last one padded."""
    monkeypatch.setattr(tpu, "MAX_TILE", 32)
    compare(Case("prompt", 20, (0, 1, 15, 44), 64, heads=3))


# Bytes, counted from the grid and the index maps: a block is copied when its index changes.


class Call(NamedTuple):
    """What a kernel was called with, and not run."""

    grid_spec: Any
    out_shape: Any
    arguments: tuple


def called(monkeypatch, *args, **options) -> Call:
    calls = []

    def record(kernel, out_shape, grid_spec, **_):
        def run(*arguments):
            calls.append(Call(grid_spec, out_shape, arguments))
            return [jnp.zeros(out.shape, out.dtype) for out in out_shape]

        return run

    with monkeypatch.context() as patch:
        patch.setattr(tpu.pl, "pallas_call", record)
        attend_tpu(*args, **options)
    return calls[0]


def copied(call: Call) -> list[int]:
    """Bytes of each input and output that move between HBM and VMEM."""
    spec, scalars = call.grid_spec, call.arguments[: call.grid_spec.num_scalar_prefetch]
    arrays = [*call.arguments[len(scalars) :], *call.out_shape]
    scalars, moved = [np.asarray(s) for s in scalars], []
    for array, block in zip(arrays, [*spec.in_specs, *spec.out_specs], strict=True):
        indices = [tuple(map(int, block.index_map(*at, *scalars))) for at in np.ndindex(*spec.grid)]
        changes = [now for now, before in zip(indices, [None, *indices], strict=False) if now != before]
        sizes = [
            [
                min(size, whole - at * size)
                for size, whole, at in zip(block.block_shape, array.shape, index, strict=True)
                if size
            ]
            for index in changes
        ]
        moved.append(sum(map(math.prod, sizes)) * array.dtype.itemsize)
    return moved


def at_length(rows: int, length: int, **options):
    """Llama-3-8B's heads over a cache of 16k slots, two of its kv heads."""
    cache = jnp.zeros((1, 2, 16384, 128), jnp.bfloat16)
    return jnp.zeros((1, rows, 8, 128), jnp.bfloat16), cache, cache, jnp.array([length]), None, SCALE


@pytest.mark.parametrize("length", [8192, 8192 - 8, 8192 - 1])
def test_eight_rows_move_little_more_than_one(monkeypatch, length):
    one, eight = (sum(copied(called(monkeypatch, *at_length(rows, length)))) for rows in (1, 8))
    least = 2 * 2 * length * 128 * 2
    assert least <= one <= eight <= 1.15 * one and eight < 1.2 * least


@pytest.mark.parametrize("splits", [1, 2])
def test_only_blocks_that_are_seen_are_copied(monkeypatch, splits):
    """At 4500 of 16384 slots: the five blocks, of two kv heads, each by one split."""
    _, _, keys, values, *_ = copied(called(monkeypatch, *at_length(8, 4500), splits=splits))
    assert keys == values == 2 * 5 * 1024 * 128 * 2


@pytest.mark.parametrize("length", [21_500, 16_390])
def test_of_a_long_ring_only_the_window_is_copied(monkeypatch, length):
    """208 positions across the border of two blocks, the second time those at the ring's two ends."""
    _, _, keys, values, *_ = copied(called(monkeypatch, *at_length(8, length), window=201))
    assert keys == values == 2 * 2 * 1024 * 128 * 2


# Whole models.


CONFIG = dataclasses.replace(
    oracle.CONFIG, windows=(5, None), window_rope=oracle.CONFIG.rope, attention_softcap=1.0
)
PROMPTS, LIMIT, SLOTS = [[1], list(range(9))], 16, 64


@functools.cache
def plain_texts():
    """The plain target, params and greedy texts, from prompts of unequal length and round a ring."""
    plain = decoder.make(CONFIG, feature_layers=(decoder.FINAL,))
    params = oracle.random_params(decoder.weights(CONFIG), 0)
    texts = [oracle.greedy_text(plain, params, prompt, LIMIT, slots=LIMIT) for prompt in PROMPTS]
    return plain, params, texts


def test_a_chain_decodes_to_the_plain_text():
    """Drafts are refused in the middle."""
    plain, params, wanted = plain_texts()
    script = np.array([text + [0] * (SLOTS - LIMIT) for text in wanted])
    script[:, ::3] += 1
    drafter = oracle.scripted(script % oracle.VOCAB, 3)
    target = decoder.make(CONFIG, feature_layers=(decoder.FINAL,), attend=kernel)
    loop = decode.make_decoder(target, drafter, greedy, chunk=4, skip_empty_rounds=False)
    state = loop.init(params, None, oracle.request(plain, PROMPTS, SLOTS, LIMIT))
    assert oracle.texts(loop.run(params, None, state)) == wanted


@pytest.mark.slow
def test_best_first_trees_decode_to_the_plain_text():
    """Target and head attend through the kernel; the head's later passes have R > T."""
    plain, params, wanted = plain_texts()
    target = decoder.make(CONFIG, feature_layers=(decoder.FINAL,), attend=kernel)
    settings = eagle1.Config(dataclasses.replace(oracle.CONFIG, layers=1))
    own = oracle.random_params(eagle1.weights(settings, ["layers.0"]), 3)
    own |= {"embed": params["embed"], "head": params["head"]}
    head = eagle1.make(settings, attend=kernel)
    drafter = eagle_dynamic(head, size=7, depth=2, topk=3, vocab_size=oracle.VOCAB)
    loop = decode.make_decoder(target, drafter, greedy, chunk=4, skip_empty_rounds=False)
    state = loop.init(params, own, oracle.request(plain, PROMPTS, SLOTS, LIMIT))
    state = loop.run(params, own, state)
    assert oracle.texts(state) == wanted and state.stats.accepted.sum() > 0


# What the kernel cannot take.


def refused(message: str, shape=(1, 2, 2, 8), dtype="float32", kv_heads=1, mask=None, **options) -> None:
    cache = jnp.zeros((shape[0], kv_heads, 80, shape[-1]), dtype)
    with pytest.raises(JspecError, match=message):
        kernel(jnp.zeros(shape, dtype), cache, cache, jnp.zeros((shape[0],), int), mask, SCALE, **options)


def test_bad_input_is_named():
    refused("query of dtype float16: the TPU kernel takes float32 and bfloat16", dtype="float16")
    refused("head_dim 320: the TPU kernel takes multiples of 8 up to 256", shape=(1, 2, 2, 320))
    refused("head_dim 12: the TPU kernel", shape=(1, 2, 2, 12))
    refused("3 query heads are no multiple of 2 kv heads", shape=(1, 2, 3, 8), kv_heads=2)
    refused("65 scratch rows of a tree: the TPU kernel takes 64", mask=jnp.ones((1, 2, 65), bool))
    refused("2 rows are more than the 1 scratch rows of the mask", mask=jnp.ones((1, 2, 1), bool))
    refused("scratch rows in one pass", mask=jnp.ones((1, 2, 3), bool), window=8)
    refused("block 100 and splits 1", block=100)
    refused("block 16 and splits 0", splits=0)
