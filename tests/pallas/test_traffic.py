"""Bytes moved: counted by hand, by `tools.traffic`, and as the TPU interpreter copies them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.verify import reference
from jspec.pallas.verify.gumbel_argmax_tpu import gumbel_argmax_tpu
from jspec.sampling import policy
from tests.pallas.recorder import recorder
from tools import traffic

BLOCK = 8 * 128 * 4  # bytes of a tile in float32


def product(x, y, interpret=False):
    """A matrix product by blocks: x's blocks are read for each j, y's for each i."""

    def body(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ y_ref[...]

    return pl.pallas_call(
        body,
        grid=(x.shape[0] // 8, y.shape[1] // 128, x.shape[1] // 128),
        in_specs=[
            pl.BlockSpec((8, 128), lambda i, j, k: (i, k)),
            pl.BlockSpec((128, 128), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((8, 128), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32),
        compiler_params=compat.tpu_params("parallel", "arbitrary", "arbitrary"),
        interpret=interpret,
    )(x, y)


def ragged(length, x, interpret=False):
    """Sums as many blocks of each row as it is long; the blocks beyond stay where they are."""

    def body(length_ref, x_ref, o_ref):
        row, step = pl.program_id(0), pl.program_id(1)

        @pl.when(step == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(step < length_ref[row])
        def _():
            o_ref[...] += x_ref[0]

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0], x.shape[1] // 8),
            in_specs=[
                pl.BlockSpec(
                    (1, 8, 128), lambda r, s, length: (r, jnp.minimum(s, jnp.maximum(length[r] - 1, 0)), 0)
                )
            ],
            out_specs=pl.BlockSpec((None, 8, 128), lambda r, s, length: (r, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 8, 128), jnp.float32),
        compiler_params=compat.tpu_params("arbitrary", "arbitrary"),
        interpret=interpret,
    )(length, x)


def by_hand(length, x, interpret=False):
    """The same with copies of its own, in a loop as long as the row; a counter in SMEM picks the buffer."""

    def body(length_ref, x_ref, o_ref, buffers, counter, semaphore):
        row = pl.program_id(0)
        o_ref[...] = jnp.zeros_like(o_ref)
        counter[0] = 0

        def step(s, _):
            slot = counter[0] % 2
            copy = pltpu.make_async_copy(x_ref.at[row, pl.ds(s * 8, 8)], buffers.at[slot], semaphore)
            copy.start()
            copy.wait()
            o_ref[...] += buffers[slot]
            counter[0] += 1
            return _

        lax.fori_loop(0, length_ref[row], step, None)

        @pl.when(counter[0] > 2)  # known only if the counter is followed
        def _():
            copy = pltpu.make_async_copy(buffers.at[0], x_ref.at[row, pl.ds(0, 8)], semaphore)
            copy.start()
            copy.wait()

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0],),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((None, 8, 128), lambda r, length: (r, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, 8, 128), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 8, 128), jnp.float32),
        compiler_params=compat.tpu_params("arbitrary"),
        interpret=interpret,
    )(length, x)


def pairs(x, last, interpret=False):
    """Fused verification's second pass: bfloat16 rows are copied by two, the last of an odd number alone."""
    batch, nodes, vocab = x.shape
    stats = reference.RowStats(*[jnp.zeros((batch, nodes))] * 3, jnp.zeros((batch, nodes), jnp.int32))
    return gumbel_argmax_tpu(policy.make(batch, vocab), x, stats, last, x, interpret=interpret)


LENGTH, ROWS = jnp.array([3, 0, 1, 2]), jnp.ones((4, 32, 128))
LOGITS = jnp.zeros((3, 3, 256), jnp.bfloat16)  # nine rows
END = reference.LastDraw(
    jnp.array([0, 2, 2]),
    jnp.zeros((3, 2), jnp.uint32),
    LENGTH[:3, None],
    jnp.array([-1, 2, -1]),
    jnp.zeros(3),
)
KERNELS = {  # the kernel, its arguments, what it reads and writes by hand
    "product": (product, (jnp.ones((16, 256)), jnp.ones((256, 384))), (2 * 3 * 2 * 17 * BLOCK, 6 * BLOCK)),
    "ragged": (ragged, (LENGTH, ROWS), ((3 + 1 + 1 + 2) * BLOCK, 4 * BLOCK)),
    "by hand": (by_hand, (LENGTH, ROWS), ((3 + 0 + 1 + 2) * BLOCK, (4 + 1) * BLOCK)),
    "pairs": (pairs, (LOGITS, END), ((2 + 2 + 1 + 2) * 256 * 2, 3 * (4 + 4))),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("cores", [1, 2])
def test_the_count_is_what_the_interpreter_copies(monkeypatch, name, cores):
    kernel, args, expected = KERNELS[name]
    with recorder(monkeypatch) as copied:
        interpret = compat.tpu_interpreter(cores=cores)
        jax.block_until_ready(jax.jit(functools.partial(kernel, interpret=interpret))(*args))
    counted = traffic.count(kernel, *args, cores=cores)
    assert (counted.read, counted.written) == copied.totals == expected


def test_a_block_that_stays_is_fetched_once_a_core(monkeypatch):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def kernel(x, interpret=False):
        return pl.pallas_call(
            body,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32),
            compiler_params=compat.tpu_params("parallel"),
            interpret=interpret,
        )(x)

    for cores in (1, 2):
        with recorder(monkeypatch) as copied:
            interpret = compat.tpu_interpreter(cores=cores)
            jax.block_until_ready(jax.jit(functools.partial(kernel, interpret=interpret))(jnp.ones((8, 128))))
        counted = traffic.count(kernel, jnp.ones((8, 128)), cores=cores)
        assert (counted.read, counted.written) == copied.totals == (cores * BLOCK, 4 * BLOCK)


def pipeline(x, count):
    """Hopper: each program sums ``count`` pairs of rows of its own page through shared memory."""

    def body(count_ref, x_ref, o_ref, total):
        page = lax.axis_index("page")
        total[...] = jnp.zeros_like(total)
        plgpu.commit_smem()

        def step(_, tile):
            total[...] += tile[0]
            plgpu.commit_smem()

        spec = plgpu.BlockSpec((1, 2, 128), lambda i: (page, i, 0))
        plgpu.emit_pipeline(step, grid=(4,), in_specs=[spec], max_concurrent_steps=2)(x_ref)

        @pl.when(page < count_ref[0])
        def _():
            plgpu.copy_smem_to_gmem(total, o_ref.at[page])
            plgpu.wait_smem_to_gmem(0)

    return compat.gpu_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((3, 2, 128), jnp.float32),
        grid=(3,),
        grid_names=("page",),
        scratch_types=[plgpu.SMEM((2, 128), jnp.float32)],
    )(count, x)


def test_a_hopper_pipeline():
    counted = traffic.count(pipeline, jax.ShapeDtypeStruct((3, 8, 128), jnp.float32), jnp.array([2]))
    assert counted.read == 3 * 8 * 128 * 4 + 3 * 4  # the rows, and the count by every program
    assert counted.written == 2 * 2 * 128 * 4
    assert sorted(counted.parts.values()) == [(0, 2048), (12, 0), (12288, 0)]


def test_what_a_kernel_needs_may_be_computed_before_it():
    def function(length, x):
        longest = jax.jit(lambda n: jnp.sort(n)[::-1])(length)
        return by_hand(longest, x) + by_hand(jnp.zeros_like(longest), x)

    counted = traffic.count(function, LENGTH, jax.ShapeDtypeStruct((4, 32, 128), jnp.float32))
    assert counted.read == 6 * BLOCK and counted.written == 9 * BLOCK
    assert len(counted.parts) == 3  # the second call writes its blocks and reads nothing


@pytest.mark.parametrize("kernel", [ragged, by_hand])
def test_what_is_not_known_is_named(kernel):
    length, x = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (LENGTH, ROWS))
    with pytest.raises(JspecError, match=r"body: .* depends on values that are not known"):
        traffic.count(kernel, length, x)


def test_a_kernel_inside_what_is_not_followed_is_refused():
    def rows(x):
        return lax.map(lambda row: product(row, jnp.ones((128, 128))), x)

    counted = traffic.count(rows, jnp.ones((3, 8, 128)))
    assert counted.read == 3 * 17 * BLOCK
    with pytest.raises(JspecError, match=r"the kernels inside '.*' cannot be counted"):
        traffic.count(jax.checkpoint(lambda x: product(x, jnp.ones((128, 128)))), jnp.ones((8, 128)))


def test_plain_code_moves_nothing_that_is_counted():
    assert traffic.count(lambda x: jnp.cumsum(x) + 1, np.ones(5)) == (0, 0, {})
