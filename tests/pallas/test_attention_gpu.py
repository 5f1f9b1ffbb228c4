"""The GPU form of verification attention against the plain one, interpreted with data races looked for."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from jspec import tree
from jspec.errors import JspecError
from jspec.models import decoder
from jspec.pallas import compat
from jspec.pallas.attention.gpu import attend_gpu, bytes_moved
from jspec.pallas.attention.reference import attend_ref
from tests import oracle
from tests.pallas.attention_cases import Case, arrays, edges, options, turns
from tests.pallas.wide import wide

BLOCK = 64
SCALE = 0.3


pytestmark = pytest.mark.usefixtures("quick_compilation")


def gpu(name: str, rows: int, lengths: tuple[int, ...], slots: int, **options) -> Case:
    return Case(name, rows, lengths, slots, dtype="bfloat16", **{"head_dim": 64, **options})


def plain(name: str, rows: int, slots: int = 200, scratch: int | None = None, **options) -> Case:
    lengths = edges(slots, scratch or rows, BLOCK)
    return gpu(name, rows, lengths, slots, scratch=scratch, **options)


# Each with the number of splits.
CASES = [
    (plain("one row, grouped by four", 1, heads=4), 1),
    (gpu("chain of five, two kv heads, soft cap", 5, (0, 62, 195), 200, heads=6, kv_heads=2, softcap=2.0), 1),
    (gpu("tree of eight, wide heads", 8, (1, 56, 64, 120), 128, tree=True, heads=4, head_dim=128), 2),
    (gpu("tree of 33, more steps than stages", 33, (0, 31, 380), 448, tree=True, heads=1), 1),
    (gpu("tree of 64 in three tiles", 64, (0, 65), 192, tree=True, heads=3), 1),
    (gpu("chain of 70 in three tiles", 70, (1, 120), 192), 2),
    (gpu("a later pass of a drafter", 4, (0, 55, 115), 128, scratch=13, tree=True), 2),
    (gpu("a cache smaller than a block", 5, (0, 1, 8), 13, tree=True), 1),
    (gpu("chain of five round a ring", 5, (0, 69, 81, 373), 80, window=70), 1),
    (gpu("tree of eight round a ring of three blocks", 8, (60, 200, 600), 152, tree=True, window=80), 2),
    (gpu("tree deeper than its window, small ring", 12, (0, 30, 100), 29, tree=True, window=3), 1),
    (gpu("a ring longer than its window", 3, (0, 255, 318, 460), 256, window=100, softcap=1.0), 1),
]

PRODUCT = [
    (plain(f"{rows} rows, tree {tree}, group {group}, cap {cap}", rows, tree=tree, heads=group,
           softcap=cap), 2)
    for rows in (1, 5, 8, 33, 64)
    for tree in (False, True)
    for group in (1, 3, 4)
    for cap in (None, 2.0)
] + [
    (gpu(f"{rows} rows, window {window}, slots {slots}, tree {tree}", rows, turns(slots, window), slots,
         tree=tree, window=window), 2)
    for rows in (1, 5, 33)
    for window in (1, 64, 65, 100)
    for slots in (-(-(window - 1 + max(rows, 2)) // 8) * 8, -(-(window + 163) // 8) * 8)
    for tree in (False, True)
]  # fmt: skip


def kernel(*args, **options):
    return attend_gpu(*args, interpret=compat.gpu_interpreter(), **options)


def close(got, given, clean, case: Case) -> None:
    assert got.dtype == jnp.bfloat16 and got.shape == given.query.shape
    wide = [x.astype(jnp.float32) for x in clean[:3]]
    want = jax.jit(attend_ref, static_argnums=5, static_argnames=("window", "softcap"))(
        *wide, *clean[3:5], SCALE, **options(case, clean)
    )
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("case", "splits"), CASES, ids=lambda x: getattr(x, "name", None))
def test_equals_the_plain_form(case, splits):
    """What no row sees is NaN in the kernel's cache, and 0 in the plain form's."""
    given = arrays(case)
    got = kernel(*given[:5], SCALE, splits=splits, **options(case, given))
    close(got, given, arrays(case, unseen=0.0), case)


@pytest.mark.parametrize(("case", "splits"), wide(PRODUCT), ids=lambda x: getattr(x, "name", None))
def test_product(case, splits):
    test_equals_the_plain_form(case, splits)


def test_scratch_rows_that_no_row_sees_may_hold_anything():
    """A node whose pass failed, in both words of the bits: the plain form would return NaN."""
    case = gpu("two nodes unseen", 4, (0, 63), 192, scratch=50, tree=True)
    given, clean = (arrays(case, unseen) for unseen in (np.nan, 0.0))
    mask = given.mask.at[:, :, jnp.array([0, 40])].set(False)
    slots = given.length[:, None] + jnp.array([0, 40])

    def poison(cache, value):
        return cache.at[jnp.arange(2)[:, None], :, slots].set(value)

    given = given._replace(mask=mask, keys=poison(given.keys, np.nan), values=poison(given.values, np.nan))
    clean = clean._replace(mask=mask, keys=poison(clean.keys, 0), values=poison(clean.values, 0))
    close(kernel(*given[:5], SCALE), given, clean, case)


def test_a_row_does_not_see_its_neighbours():
    """A sequence alone and beside another gives the same bits."""
    given = arrays(gpu("two sequences", 3, (5, 100), 128, tree=True))
    both = kernel(*given[:5], SCALE, splits=2)
    alone = kernel(*(x[1:] for x in given[:5]), SCALE, splits=2)
    np.testing.assert_array_equal(both[1:].view(jnp.uint16), alone.view(jnp.uint16))


# Bytes, counted from the grid, and those that the interpreter copies.


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """The bytes of every copy that the interpreter makes between global and shared memory."""
    sizes: list[int] = []

    def watch(owner, name, size):
        original = getattr(owner, name)

        def watched(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            sizes.append(size(self, *args))
            return result

        monkeypatch.setattr(owner, name, watched)

    if hasattr(gpu_callbacks, "AsyncCopyTask"):

        def size(task, _):
            buffer = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype(task.src_allocation_key)
            return math.prod(task.src_access.shape) * np.dtype(buffer.dtype).itemsize

        watch(gpu_callbacks.AsyncCopyTask, "__call__", size)
    else:
        watch(gpu_callbacks.DeviceLocalMemoryTransfer, "execute", lambda transfer, _: transfer.data.nbytes)

        # Products store too, to accumulators, which are no global memory.
        def stored(_, key, __, value, *___):
            return value.nbytes if gpu_callbacks.is_gmem_memory_space_idx(key) else 0

        monkeypatch.setattr(
            gpu_callbacks, "is_gmem_memory_space_idx", lambda key: key.memory_space_id == 0, False
        )
        watch(shared_memory.GPUSharedMemory, "store_buffer_content", stored)
    return sizes


@pytest.mark.parametrize(
    "case",
    [
        gpu("chain", 3, (61, 62), 256, heads=8, kv_heads=2),
        gpu("tree", 5, (100,), 200, scratch=30, tree=True, head_dim=128),
        gpu("ring", 2, (300, 450), 256, window=70),
    ],
    ids=lambda case: case.name,
)
def test_the_count_of_bytes_is_what_is_copied(case, copied):
    given = arrays(case)
    kernel(*given[:5], SCALE, splits=2, **options(case, given))
    scratch = None if given.mask is None else given.mask.shape[2]
    shape = (given.query.shape, case.kv_heads, case.slots, case.lengths)
    assert sum(copied) == bytes_moved(*shape, scratch, case.window, splits=2)


@pytest.mark.parametrize("length", [8192, 8192 - 8, 8192 - 1])
@pytest.mark.parametrize("batch", [1, 8])
def test_eight_rows_move_little_more_than_one(length, batch):
    """Llama 3 8B's heads at 8k tokens of 16k slots."""
    one, eight = (bytes_moved((batch, rows, 32, 128), 8, 16384, [length] * batch) for rows in (1, 8))
    least = batch * 8 * 2 * length * 128 * 2
    assert least <= one <= eight <= 1.15 * one and eight < 1.2 * least


def test_only_blocks_that_are_seen_are_copied():
    """Blocks of 64 slots end at 64, 128, ...; the last of three rows stands two slots after the length."""
    moved = [bytes_moved((1, 3, 8, 64), 2, 256, [length], splits=1) for length in (0, 61, 62, 125, 126, 253)]
    block = 2 * 64 * 64 * 2 * 2  # K and V of two heads
    assert np.diff(moved).tolist() == [0, block, 0, block, block]
    assert moved[0] == block + 2 * (16 * 64 * (2 + 4) + 64 * 4 + 2 * 64 * 4)


def test_of_a_long_ring_only_the_window_is_copied():
    """Positions 21_300 .. 21_502 lie in slots 4916 .. 5118, of blocks 76 .. 79."""
    (rest, ring) = (
        bytes_moved((1, 3, 2, 64), 1, 16384, [length], window=201, splits=1) for length in (0, 21_500)
    )
    assert ring - rest == 3 * 64 * 64 * 2 * 2


# What the kernel cannot take.


def refused(message: str, shape=(1, 2, 2, 64), dtype=jnp.bfloat16, kv_heads=1, mask=None, **options) -> None:
    cache = jnp.zeros((shape[0], kv_heads, options.pop("slots", 128), shape[-1]), dtype)
    query = jnp.zeros(shape, options.pop("query_dtype", dtype))
    with pytest.raises(JspecError, match=message):
        kernel(query, cache, cache, jnp.zeros((shape[0],), int), mask, SCALE, **options)


def test_bad_input_is_named():
    refused("bfloat16 cache, not float32", dtype=jnp.float32, query_dtype=jnp.bfloat16)
    refused("bfloat16 query, not float32", query_dtype=jnp.float32)
    refused("head_dim of 64 or 128, not 96", shape=(1, 2, 2, 96))
    refused("3 query heads are no multiple of 2 kv heads", shape=(1, 2, 3, 64), kv_heads=2)
    refused("to 64 nodes, not 65", mask=jnp.ones((1, 2, 65), bool))
    refused("trees of 2 .* not 1", mask=jnp.ones((1, 2, 1), bool))
    refused("scratch rows in one pass", mask=jnp.ones((1, 2, 3), bool), window=8)
    refused("not 32 slots", block=32)
    refused("not 256 slots at head_dim 128", shape=(1, 2, 2, 128), block=256)
    refused("multiple of 8 slots, not 129", slots=129)
    refused("at least 1 split, not 0", splits=0)


@pytest.mark.slow
def test_a_model_attends_through_the_kernel():
    """A prompt, then a tree beside a ring: hidden states as those of the plain form, in bfloat16."""
    config = dataclasses.replace(
        oracle.CONFIG, head_dim=64, windows=(5, None), window_rope=oracle.CONFIG.rope, attention_softcap=2.0
    )
    params = oracle.random_params(decoder.weights(config), 0)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(oracle.VOCAB, size=(2, 14)))
    hidden = []
    for form in (attend_ref, kernel):
        model = decoder.make(config, dtype=jnp.bfloat16, attend=form)
        cache = model.init_cache(2, 64, 9)
        _, _, cache = model.forward(params, cache, tokens[:, :9], tree.chain(2, 9))
        cache = model.commit(cache, None, jnp.array([9, 4]))
        parents = jnp.array([[-1, 0, 0, 1, 3]] * 2)
        hidden.append(model.forward(params, cache, tokens[:, 9:], tree.from_parents(parents))[0])
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in hidden), rtol=0.05, atol=0.05)
