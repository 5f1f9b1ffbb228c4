"""The kernels, one line each in `CASES`: what `aot.py` compiles and `gpu_check.py` runs and times.

A case brings its inputs in two sizes: a real one, that of Llama-3.1-8B where it applies,
and a tiny one that an interpreter runs in a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tree
from jspec.cache.dense import Entry
from jspec.pallas import compat
from jspec.pallas.attention.gpu import attend_gpu
from jspec.pallas.attention.reference import attend_ref
from jspec.pallas.attention.tpu import attend_tpu
from jspec.pallas.commit.gpu import compact_gpu
from jspec.pallas.commit.reference import compact_ref
from jspec.pallas.commit.tpu import compact_tpu
from jspec.pallas.verify import reference
from jspec.pallas.verify.gumbel_argmax_gpu import gumbel_argmax_gpu
from jspec.pallas.verify.gumbel_argmax_tpu import gumbel_argmax_tpu
from jspec.pallas.verify.row_stats_gpu import row_stats_gpu
from jspec.pallas.verify.row_stats_tpu import row_stats_tpu
from jspec.sampling import keys, policy


class Case(NamedTuple):
    """A kernel for one kind of chip.

    * ``kernel(*inputs, interpret=False)`` and its plain ``reference(*inputs)``.
    * ``inputs(tiny)``: a tuple of arrays (or trees of them), the same at each call.
    * ``tolerance``: how far a result may be from the reference's.
    * ``temporaries``: the greatest share of the inputs' bytes that the compiled call may
      allocate beside them. ``donate``: the inputs that it gives away.
    * ``fails``: it must be refused, in these words.
    * ``counted``: what to count the bytes of, where the kernel's own depend on what it reads.
    """

    name: str
    platform: str  # "tpu" or "gpu"
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[bool], tuple]
    tolerance: float = 0.0
    temporaries: float = 0.02
    donate: tuple[int, ...] = ()
    fails: str = ""
    counted: Callable[..., Any] | None = None


def row_sums(x, rows: int = 8, interpret: Any = False):
    """TPU: the sum of each row, by blocks of ``rows`` whole rows. The smallest kernel of the list."""

    def body(x_ref, o_ref):
        o_ref[...] = jnp.sum(x_ref[...], axis=1, keepdims=True)

    return pl.pallas_call(
        body,
        grid=(x.shape[0] // rows,),
        in_specs=[pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((rows, 1), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype),
        compiler_params=compat.tpu_params("parallel"),
        interpret=interpret,
    )(x)


def page_sums(x, rows: int = 8, interpret: Any = False):
    """Hopper: the sum of each page's tiles of ``rows`` rows, which go through shared memory."""
    pages, length, hidden_size = x.shape

    def body(x_ref, o_ref, total):
        page = lax.axis_index("page")
        total[...] = jnp.zeros_like(total)
        plgpu.commit_smem()

        def step(_, tile):
            total[...] += tile[0]
            plgpu.commit_smem()

        spec = plgpu.BlockSpec((1, rows, hidden_size), lambda i: (page, i, 0))
        plgpu.emit_pipeline(step, grid=(length // rows,), in_specs=[spec], max_concurrent_steps=2)(x_ref)
        plgpu.copy_smem_to_gmem(total, o_ref.at[page])
        plgpu.wait_smem_to_gmem(0)

    return compat.gpu_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((pages, rows, hidden_size), x.dtype),
        grid=(pages,),
        grid_names=("page",),
        scratch_types=[plgpu.SMEM((rows, hidden_size), x.dtype)],
        interpret=interpret,
    )(x)


def many_rows(x, interpret: Any = False):
    """192 MiB of blocks: two of an input's, which no TPU's vector memory holds."""
    return row_sums(x, rows=x.shape[0] // 2, interpret=interpret)


def many_tiles(x, interpret: Any = False):
    """256 KiB of shared memory, of which a program has 227."""
    return page_sums(x, rows=128, interpret=interpret)


def integers(*shape: int) -> np.ndarray:
    """Small whole numbers, whose float32 sums are exact in any order."""
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


def rows(tiny: bool) -> tuple:
    return (integers(16 if tiny else 4096, 256 if tiny else 4096),)


def huge(tiny: bool) -> tuple:
    return (integers(16, 256) if tiny else np.zeros((16384, 3072), np.float32),)


def pages(tiny: bool) -> tuple:
    return (integers(*((3, 16, 128) if tiny else (132, 1024, 256))),)


def sum_rows(x):
    return x.sum(axis=1, keepdims=True)


def sum_pages(x):
    return x.reshape(x.shape[0], -1, 8, x.shape[2]).sum(axis=1)


def by_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pass of fused verification with its arrays [B, N, V] given as rows [B N, V].

    In the loop the head's product makes such rows. As an argument of a program [B, N, V]
    would have tiles of N rows, and be copied.
    """

    @functools.wraps(function)
    def on_rows(settings, x, *others, **options):
        batch = settings.temperature.shape[0]
        x, others = jax.tree.map(
            lambda a: a.reshape(batch, -1, a.shape[-1]) if a.shape == x.shape else a, (x, others)
        )
        return function(settings, x, *others, **options)

    return on_rows


PLAIN_STATS, PLAIN_DRAW = by_rows(reference.row_stats_ref), by_rows(reference.gumbel_argmax_ref)


def read_once(settings, x):
    """Hopper's first pass where nothing has to be read again."""
    return row_stats_gpu(settings._replace(temperature=0 * settings.temperature), x)


def logits(tiny: bool) -> tuple:
    """Eight sequences, K = 4: each row's settings, and logits of Llama 3's vocabulary."""
    batch, vocab = (2, 1000) if tiny else (8, 128256)
    settings = policy.make(batch, vocab, temperature=0.8, top_k=40, top_p=0.9)
    return settings, np.asarray(3 * jax.random.normal(jax.random.key(0), (batch * 5, vocab)))


def last_draws(tiny: bool) -> tuple:
    """The same, and where each walk ended: at node 2, with a refused draft whose distribution is known."""
    settings, x = logits(tiny)
    batch = len(x) // 5
    refused, node = np.full((batch, 1), -1), np.full(batch, 2)
    last = reference.LastDraw(
        node, keys.row_keys(range(batch), batch), refused, node + 1, np.zeros(batch, np.float32)
    )
    logq = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), x.shape))
    return settings, x, PLAIN_STATS(settings, jnp.asarray(x)), last, np.asarray(logq)


def last_draws_bfloat16(tiny: bool) -> tuple:
    """The same in bfloat16, of a vocabulary whose rows are copied by two, the last of 35 alone."""
    settings, x, _, last, logq = last_draws(tiny)
    settings, last = jax.tree.map(lambda leaf: leaf[1:], (settings, last))
    x, logq = (rows[5:, : x.shape[1] // 128 * 128].astype(jnp.bfloat16) for rows in (x, logq))
    return settings, x, PLAIN_STATS(settings, jnp.asarray(x)), last, logq


def logits_bfloat16(tiny: bool) -> tuple:
    """The first pass's inputs in bfloat16."""
    settings, x = logits(tiny)
    return settings, x.astype(jnp.bfloat16)


def path(tiny: bool) -> tuple:
    """Half the layers of Llama-3.1-8B, and a path of eight accepted nodes, most not in their place."""
    layers, slots = (2, 64) if tiny else (16, 8192)
    dtype, shape = jnp.float32 if tiny else jnp.bfloat16, (1, 8, slots, 128)
    cache = tuple(Entry(*np.random.default_rng(i).random((2, *shape)).astype(dtype)) for i in range(layers))
    return cache, np.array([[0, 2, 5, 6, 9, 10, 12, 15]]), np.array([slots - 32])


def scaled(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention as a function of arrays alone."""

    @functools.wraps(attend)
    def of_arrays(*arrays, **options):
        return attend(*arrays, arrays[0].shape[-1] ** -0.5, **options)

    return of_arrays


def rows_and_cache(tiny: bool) -> tuple:
    """Eight nodes of a tree over a long cache: heads of Llama-3.1-8B, bfloat16."""
    slots, heads, kv_heads = (192, 8, 2) if tiny else (8192, 32, 8)
    draw = np.random.default_rng(0)
    query = draw.normal(size=(1, 8, heads, 128)).astype(jnp.bfloat16)
    keys, values = draw.normal(size=(2, 1, kv_heads, slots, 128)).astype(jnp.bfloat16)
    mask = tree.from_parents(jnp.array([[-1, 0, 0, 1, 1, 2, 3, 6]])).mask
    return query, keys, values, np.array([slots - 8], np.int32), np.asarray(mask)


CASES = [
    Case("row sums", "tpu", row_sums, sum_rows, rows, temporaries=0.05),
    Case("page sums", "gpu", page_sums, sum_pages, pages),
    Case("row_stats", "tpu", by_rows(row_stats_tpu), PLAIN_STATS, logits),
    Case(
        "row_stats bfloat16",
        "tpu",
        by_rows(row_stats_tpu),
        PLAIN_STATS,
        logits_bfloat16,
        temporaries=0.03,  # columns of a number a row are padded to tiles
    ),
    Case("gumbel_argmax", "tpu", by_rows(gumbel_argmax_tpu), PLAIN_DRAW, last_draws),
    Case("gumbel_argmax bfloat16", "tpu", by_rows(gumbel_argmax_tpu), PLAIN_DRAW, last_draws_bfloat16),
    *(
        Case(
            name,
            "gpu",
            by_rows(row_stats_gpu),
            PLAIN_STATS,
            inputs,
            tolerance=1e-4,
            counted=by_rows(read_once),
        )
        for name, inputs in (("row_stats", logits), ("row_stats bfloat16", logits_bfloat16))
    ),
    Case("gumbel_argmax", "gpu", by_rows(gumbel_argmax_gpu), PLAIN_DRAW, last_draws, 1e-4),
    Case("gumbel_argmax bfloat16", "gpu", by_rows(gumbel_argmax_gpu), PLAIN_DRAW, last_draws_bfloat16, 1e-4),
    Case("attention", "tpu", scaled(attend_tpu), scaled(attend_ref), rows_and_cache, tolerance=0.03),
    Case(
        "attention",
        "gpu",
        scaled(attend_gpu),
        scaled(attend_ref),
        rows_and_cache,
        tolerance=0.03,
        temporaries=0.1,  # the partial sums of the splits
    ),
    Case("commit", "tpu", compact_tpu, compact_ref, path, donate=(0,)),
    Case("commit", "gpu", compact_gpu, compact_ref, path, donate=(0,)),
    # what only a compiler refuses (tests/pallas/test_gates.py has the other planted bugs)
    Case("too much VMEM", "tpu", many_rows, sum_rows, huge, fails="RESOURCE_EXHAUSTED"),
    Case("too much SMEM", "gpu", many_tiles, sum_pages, pages, fails="shared memory"),
]
