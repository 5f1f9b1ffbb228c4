"""The GPU kernels of fused verification against their references, on a simulated Hopper GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.verify import fused, reference
from jspec.pallas.verify.gumbel_argmax_gpu import gumbel_argmax_gpu
from jspec.pallas.verify.row_stats_gpu import row_stats_and_sweeps, row_stats_gpu
from jspec.sampling import walk
from tests.pallas import test_verify
from tests.pallas import verify_cases as cases
from tests.pallas.verify_cases import check_row_stats, hard
from tests.pallas.wide import wide

GPU = compat.gpu_interpreter()
SHAPES = [  # ids, rows a sequence, dtype, ids a program
    (vocab, nodes, dtype, span)
    for vocab in (1, 5, 257, 1000, 4097)
    for nodes in (1, 2, 7)
    for dtype in ("float32", "bfloat16")
    for span in (256, 1024)
    if vocab <= 256 * 8 or span > 256  # many programs are slow to interpret
]
FEW = [(5, 2, "bfloat16", 128), (1000, 1, "float32", 512)]


@pytest.mark.parametrize(("vocab", "nodes", "dtype", "span"), FEW + wide(SHAPES))
def test_row_stats(vocab, nodes, dtype, span):
    policy = cases.settings(vocab)
    kernel = jax.jit(functools.partial(row_stats_gpu, span=span, interpret=GPU))
    x = hard(vocab, nodes, vocab, dtype)
    check_row_stats(policy, x, kernel(policy, x), reference.row_stats_ref(policy, x))


@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False])
def test_how_often_a_row_is_read(flat):
    """Once, whatever the settings, but where more logits matter than the lanes keep."""
    policy, shape = cases.settings(4097), (cases.BATCH, 1, 4097)
    kernel = jax.jit(functools.partial(row_stats_and_sweeps, span=128, interpret=GPU))
    draw = np.random.default_rng(0)
    steep = -2 * np.log(1 + draw.permuted(np.broadcast_to(np.arange(shape[2]), shape), axis=2))
    x = jnp.asarray(draw.normal(size=shape) if flat else steep, jnp.float32)
    stats, sweeps = kernel(policy, x)
    check_row_stats(policy, x, stats, reference.row_stats_ref(policy, x))
    nucleus = np.asarray((policy.top_p < 1) & (policy.top_k == 0))
    np.testing.assert_array_equal(np.asarray(sweeps)[:, 0] > 1, flat & nucleus)
    assert np.all(sweeps <= 67)


def draws(seed: int, x: jax.Array, drawn: bool) -> tuple[reference.LastDraw, jax.Array | None]:
    """Where six sequences end: likely ids refused, q of a child, and rows where nothing is left."""
    draw = np.random.default_rng(seed)
    nodes, vocab = x.shape[1:]
    node = draw.integers(0, nodes, cases.BATCH)
    likely = np.argsort(np.asarray(x, np.float32)[np.arange(cases.BATCH), node], axis=-1)[:, -2:]
    refused = np.concatenate([likely, np.full((cases.BATCH, 1), -1)], axis=1)
    if vocab <= 5:
        refused = np.tile(np.arange(vocab), (cases.BATCH, 1))  # all of them
        refused[:3, -1] = -1
    child = np.where(np.arange(cases.BATCH) % 3, np.arange(cases.BATCH) % nodes, -1)
    last = reference.LastDraw(
        node=jnp.asarray(node),
        key=cases.row_keys(100 * seed + vocab),
        refused=jnp.asarray(refused),
        child=jnp.asarray(child) if drawn else jnp.full(cases.BATCH, -1),
        log_reach=jnp.asarray(-draw.uniform(0, 2, cases.BATCH), jnp.float32),
    )
    logq = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(seed), (cases.BATCH, nodes, vocab)))
    return last, logq.at[4].set(0.0) if drawn else None  # q = 1: nothing is left


DRAWS = [(1, 1, "float32", 128, False), (5, 3, "bfloat16", 128, True), (1000, 2, "float32", 256, True)]
DRAWS += [(4097, 1, "bfloat16", 1024, False)]
DRAWS += wide([(*each, drawn) for each in SHAPES for drawn in (False, True)])


@pytest.mark.parametrize(("vocab", "nodes", "dtype", "span", "drawn"), DRAWS)
def test_gumbel_argmax(vocab, nodes, dtype, span, drawn):
    policy = cases.settings(vocab)
    kernel = jax.jit(functools.partial(gumbel_argmax_gpu, span=span, interpret=GPU))
    plain = jax.jit(reference.gumbel_argmax_ref)
    for seed in range(6):
        x = hard(seed, nodes, vocab, dtype)
        stats = reference.row_stats_ref(policy, x)
        last, logq = draws(seed, x, drawn)
        (token, logp), wanted = (each(policy, x, stats, last, logq) for each in (kernel, plain))
        good = np.isfinite(stats.top[np.arange(cases.BATCH), last.node])
        np.testing.assert_array_equal(np.where(good, token, 0), np.where(good, wanted[0], 0))
        np.testing.assert_allclose(np.where(good, logp, 0), np.where(good, wanted[1], 0), atol=1e-5)
        assert not np.any(np.isfinite(logp) & ~good)
        assert np.all((token >= 0) & (token < vocab))


ROUNDS = [(verifier, tree_of, 3) for verifier in ("greedy", "token", "coupled") for tree_of in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "tree_of", "seeds"), ROUNDS)
def test_verdicts_are_those_of_the_walk(verifier, tree_of, seeds):
    vocab, nodes = 23, 3
    kernels = row_stats_gpu, gumbel_argmax_gpu
    decide = fused.make(*(functools.partial(kernel, interpret=GPU) for kernel in kernels))
    policy, history = cases.settings(vocab), cases.history(vocab)
    accepted = 0
    for seed in range(seeds):
        drawn = verifier == "token" and not tree_of
        proposal = cases.proposal(seed, nodes, vocab, tree_of=tree_of, drawn=drawn)
        x = cases.logits(seed, nodes, vocab).at[:, :, :3].add(4)
        given = policy, history, cases.row_keys(seed), jnp.arange(cases.BATCH) + seed, proposal, x
        plain, got = (
            test_verify.compiled(d, verifier)(*given, depth=nodes - 1) for d in (walk.decide, decide)
        )
        test_verify.same(plain, got)
        accepted += int(plain.accepted.sum())
    assert accepted > 0


@pytest.mark.parametrize(
    ("shape", "dtype", "span", "message"),
    [
        ((1, 1, 300), "float16", 128, "float32 or bfloat16, not float16"),
        ((1, 1, 1 << 24), "float32", 128, "less than 16777216 ids, not 16777216"),
        ((1, 1, 300), "float32", 200, "span is 200; it must be a multiple of 128"),
    ],
)
def test_what_the_kernels_refuse(shape, dtype, span, message):
    policy = jax.tree.map(lambda part: part[:1], cases.settings(5))
    stats = reference.RowStats(*[jnp.zeros((1, 1))] * 3, jnp.zeros((1, 1), int))
    last = jax.tree.map(lambda part: part[:1], draws(0, cases.logits(0, 1, 5), False)[0])
    x = jax.ShapeDtypeStruct(shape, dtype)
    for call in (
        lambda x: row_stats_gpu(policy, x, span=span),
        lambda x: gumbel_argmax_gpu(policy, x, stats, last, span=span),
    ):
        with pytest.raises(JspecError, match=message):
            jax.eval_shape(call, x)
