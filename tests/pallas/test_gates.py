"""Which gate catches which bug: each is planted in a small kernel, beside a healthy twin.

| planted bug | plain interpreter | simulated chip | lowering | compiling (`make aot`) |
|---|---|---|---|---|
| accumulator never initialised | NaN | NaN | | |
| read past the block | hidden | IndexError | | |
| accumulation over a parallel axis | | a data race | | |
| a block shape the chip cannot take | | | ValueError | |
| more blocks than vector memory | | | | refused |
| an operation without a lowering | | | refused | |
| Hopper: shared memory not committed | | a data race, from jax 0.12 on | | |
| Hopper: more shared memory than there is | | | ValueError | refused |

An empty place: that gate lets the bug through, which is tested where it is cheap. No gate
sees them all, so a kernel passes all of them.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from jspec.pallas import compat
from jspec.pallas.verify import row_stats_gpu
from jspec.sampling import policy

X = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)
MINOR = tuple(map(int, jax.__version__.split(".")[:2]))


def column_sums(x, *, initialised=True, semantics="arbitrary", interpret=False):
    """Sum the tiles of 8 rows into one."""

    def body(x_ref, o_ref):
        first = pl.program_id(0) == 0

        @pl.when(first & initialised)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    return pl.pallas_call(
        body,
        grid=(x.shape[0] // 8,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
        compiler_params=compat.tpu_params(semantics),
        interpret=interpret,
    )(x)


def row_at(x, index, *, interpret=False):
    """One row of a block, chosen by a traced index."""

    def body(index_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(index_ref[0], 1), :]

    return pl.pallas_call(
        body,
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec((8, 128), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((1, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((1, 128), x.dtype),
        interpret=interpret,
    )(index, x)


def twice(x, *, block=(8, 128), operation=lambda tile: 2 * tile, interpret=False):
    """An operation on each block."""

    def body(x_ref, o_ref):
        o_ref[...] = operation(x_ref[...])

    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // block[0], x.shape[1] // block[1]),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x)


def tiles_sum(x, *, rows=8, committed=True, interpret=False):
    """Hopper: sum the tiles of a page in shared memory."""

    def body(x_ref, o_ref, total):
        total[...] = jnp.zeros_like(total)
        plgpu.commit_smem()

        def step(_, tile):
            total[...] += tile[...]
            if committed:
                plgpu.commit_smem()

        spec = plgpu.BlockSpec((rows, 128), lambda i: (i, 0))
        plgpu.emit_pipeline(step, grid=(x.shape[0] // rows,), in_specs=[spec], max_concurrent_steps=2)(x_ref)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(total, o_ref)
        plgpu.wait_smem_to_gmem(0)

    return compat.gpu_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, 128), x.dtype),
        grid=(1,),
        grid_names=("page",),
        scratch_types=[plgpu.SMEM((rows, 128), x.dtype)],
        interpret=interpret,
    )(x)


def raced(function, *args) -> bool:
    """Whether the interpreter reports a data race, by an exception (jax 0.12) or by its flag."""
    try:
        jax.block_until_ready(jax.jit(function)(*args))
        return compat.races_found()
    except Exception as error:
        if "race" not in str(error).lower():
            raise
        return True
    finally:
        compat.reset_interpreters()


def lower(function, *args, platform="tpu"):
    """Lower for a chip that is not here; no plugin is needed."""
    kind = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H100 80GB HBM3"}[platform]
    device = AbstractDevice(
        device_kind=kind,
        platform={"cuda": "gpu"}.get(platform, platform),
        num_cores=132 if platform == "cuda" else 1,
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("interpret", [True, compat.tpu_interpreter()], ids=["plain", "chip"])
def test_an_accumulator_never_initialised(interpret):
    healthy = column_sums(X, interpret=interpret)
    np.testing.assert_array_equal(healthy, X.reshape(4, 8, 128).sum(0))
    planted = column_sums(X, initialised=False, interpret=interpret)
    assert jnp.isnan(planted).all()


def test_a_read_past_the_block():
    def read(index, interpret):
        return jax.block_until_ready(row_at(X, jnp.array([index]), interpret=interpret))

    for interpret in (True, compat.tpu_interpreter()):
        assert (read(7, interpret)[0] == X[7]).all()
    assert (read(8, True)[0] == X[7]).all()  # clamped: this gate sees nothing
    with pytest.raises(Exception, match="Out-of-bounds read"):
        read(8, compat.tpu_interpreter())
    compat.reset_interpreters()


def test_accumulation_over_a_parallel_axis():
    def kernel(semantics, **options):
        return lambda x: column_sums(x, semantics=semantics, interpret=compat.tpu_interpreter(**options))

    assert not raced(kernel("arbitrary"), X)
    assert raced(kernel("parallel"), X)
    assert not raced(kernel("parallel", cores=1), X)  # so the gate needs two cores
    assert not raced(kernel("parallel", races=False), X)


def test_a_block_shape_that_the_chip_cannot_take():
    wide = jnp.ones((40, 400))
    assert "tpu_custom_call" in lower(lambda x: twice(x, block=(40, 400)), wide)
    assert "tpu_custom_call" in lower(lambda x: twice(x, block=(8, 128)), jnp.ones((40, 384)))
    assert (twice(wide, block=(5, 100), interpret=compat.tpu_interpreter()) == 2).all()  # runs there
    with pytest.raises(ValueError, match="block shape"):
        lower(lambda x: twice(x, block=(5, 100)), wide)


def test_an_operation_without_a_lowering():
    def kernel(x, interpret=False):
        return twice(x, operation=lambda tile: jnp.sort(tile, axis=1), interpret=interpret)

    assert "tpu_custom_call" in lower(twice, X)
    assert (kernel(X[:, ::-1], compat.tpu_interpreter()) == X).all()  # runs there
    with pytest.raises(NotImplementedError, match="sort"):
        lower(kernel, X)


def test_more_blocks_than_vector_memory():
    huge = jax.ShapeDtypeStruct((16384, 3072), jnp.float32)
    for rows in (8, 8192):  # lowers all the same: `make aot` has the case that is refused
        assert "tpu_custom_call" in lower(lambda x, rows=rows: twice(x, block=(rows, 3072)), huge)


@pytest.mark.skipif(MINOR < (0, 12), reason="the interpreter of jax 0.10 does not look for this data race")
def test_hopper_shared_memory_not_committed():
    def kernel(committed):
        return lambda x: tiles_sum(x, committed=committed, interpret=compat.gpu_interpreter())

    assert not raced(kernel(True), X)
    assert raced(kernel(False), X)


@pytest.mark.skipif(
    MINOR < (0, 12), reason="the interpreter of jax 0.10 hangs when it has found this data race"
)
@pytest.mark.parametrize("skipped", [0, 1])
def test_hopper_warpgroups_that_do_not_wait_for_each_other(skipped, monkeypatch):
    """Before they read each other's numbers, or before they write the next ones."""
    rows, meet, calls = policy.make(1, 300, top_k=3), row_stats_gpu._meet, itertools.count()

    def row_stats(x):
        return row_stats_gpu.row_stats_gpu(rows, x, interpret=compat.gpu_interpreter())

    x = X.reshape(1, 1, -1)[..., :300]
    assert not raced(row_stats, x)
    monkeypatch.setattr(row_stats_gpu, "_meet", lambda met: next(calls) % 2 == skipped or meet(met))
    assert raced(lambda x: row_stats(x), x)  # a function that jit has not seen


def test_hopper_numbers():
    found = tiles_sum(X, interpret=compat.gpu_interpreter())
    np.testing.assert_array_equal(found, X.reshape(4, 8, 128).sum(0))


def test_hopper_more_shared_memory_than_there_is():
    def page(rows):
        return jax.ShapeDtypeStruct((rows * 4, 128), jnp.float32)

    assert "mosaic_gpu" in lower(lambda x: tiles_sum(x, rows=64), page(64), platform="cuda")
    with pytest.raises(ValueError, match=r"(?i)shared memory|smem"):
        lower(lambda x: tiles_sum(x, rows=256), page(256), platform="cuda")
