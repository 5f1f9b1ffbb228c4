"""The TPU forms of the two passes, interpreted with data races looked for on two cores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.verify import reference, threefry
from jspec.pallas.verify.gumbel_argmax_tpu import gumbel_argmax_tpu
from jspec.pallas.verify.row_stats_tpu import row_stats_tpu
from jspec.sampling import keys, policy
from tests.pallas import verify_cases as cases
from tests.pallas.wide import wide

INTERPRET = compat.tpu_interpreter()
F32, BF16 = jnp.float32, jnp.bfloat16
# (N, V, dtype, a draft's distribution): V = 256 is copied by rows, bfloat16 by pairs, others by whole tiles
CASES = [(7, 5, F32, False), (5, 256, F32, True), (9, 1000, BF16, True)]
WIDE = [
    (nodes, vocab, dtype, drawn)
    for nodes, vocab in [(1, 1), (7, 5), (1, 128), (5, 256), (9, 1000), (2, 4224), (17, 640)]
    for dtype in (F32, BF16)
    for drawn in (False, True)
    if (nodes, vocab, dtype, drawn) not in CASES
]
CASES += wide(WIDE)


@functools.cache
def passes():
    return (
        jax.jit(functools.partial(row_stats_tpu, interpret=INTERPRET)),
        jax.jit(functools.partial(gumbel_argmax_tpu, interpret=INTERPRET)),
        jax.jit(reference.row_stats_ref),
        jax.jit(reference.gumbel_argmax_ref),
    )


def logits(nodes: int, vocab: int, dtype) -> jax.Array:
    """With ties, -inf, and (in row 1) what is no distribution."""
    x = np.array(cases.logits(nodes, nodes, vocab, dtype).astype(jnp.float32))
    x[:, :, vocab // 2 :] = np.round(x[:, :, vocab // 2 :])
    if vocab > 4:
        x[0, 0, 3] = -np.inf
        x[1, -1, 4], x[1, 0] = np.nan, -np.inf
        x[1, nodes // 2, 1] = np.inf
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize(("nodes", "vocab", "dtype", "drawn"), CASES)
def test_row_stats(nodes, vocab, dtype, drawn):
    rows, x = cases.settings(vocab), logits(nodes, vocab, dtype)
    kernel, _, plain, _ = passes()
    got, wanted = kernel(rows, x), plain(rows, x)
    np.testing.assert_array_equal(got.top, wanted.top)
    np.testing.assert_array_equal(got.best, wanted.best)
    good = np.isfinite(wanted.top) & (np.asarray(rows.temperature) > 0)[:, None]
    kept, wanted_kept = (np.asarray(x.astype(jnp.float32) >= part.cut[..., None]) for part in (got, wanted))
    np.testing.assert_array_equal(kept[good], wanted_kept[good])
    np.testing.assert_allclose(
        np.where(good, got.log_total, 0), np.where(good, wanted.log_total, 0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("nodes", "vocab", "dtype", "drawn"), CASES)
def test_gumbel_argmax(nodes, vocab, dtype, drawn):
    rows, x = cases.settings(vocab), cases.logits(3, nodes, vocab, dtype)
    _, kernel, stats_of, draw_plain = passes()
    stats = stats_of(rows, x)
    logq = jax.nn.log_softmax(cases.logits(4, nodes, vocab)) if drawn else None
    draw = np.random.default_rng(vocab)
    for seed in range(2):
        node = jnp.asarray(draw.integers(0, nodes, cases.BATCH))
        child = jnp.asarray(draw.integers(-1, nodes, cases.BATCH)) if drawn else jnp.full((cases.BATCH,), -1)
        refused = jnp.asarray(draw.integers(-1, vocab, (cases.BATCH, 3)))
        refused = jnp.where(child[:, None] < 0, refused, -1).at[2].set(jnp.arange(3) % vocab)
        reach = jnp.asarray(-draw.random(cases.BATCH), jnp.float32)
        last = reference.LastDraw(node, cases.row_keys(seed), refused, child, reach)
        token, logp = kernel(rows, x, stats, last, logq)
        wanted, wanted_logp = draw_plain(rows, x, stats, last, logq)
        np.testing.assert_array_equal(token, wanted)
        np.testing.assert_allclose(logp, wanted_logp, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [2, 3])  # of 9 rows the last shares its words with none
def test_a_bfloat16_row_is_told_from_its_neighbour(batch):
    """Row r draws from ids 2r and 2r + 1, and the draft's next row has all its mass on the first of them."""
    nodes, vocab = 3, 256
    row = jnp.arange(batch * nodes)
    spread = jnp.full((batch * nodes, vocab), -jnp.inf, BF16)
    x = spread.at[row, 2 * row].set(0).at[row, 2 * row + 1].set(0).reshape(batch, nodes, vocab)
    logq = spread.at[row, 2 * row - 2].set(0).reshape(batch, nodes, vocab)
    rows = policy.make(batch, vocab, temperature=1.0)
    _, kernel, plain, _ = passes()
    stats, none = plain(rows, x), jnp.full((batch, 1), -1)
    for seed in range(nodes):
        node = (jnp.arange(batch) + seed) % nodes
        child = jnp.where(node < nodes - 1, node + 1, -1)
        last = reference.LastDraw(node, keys.row_keys([seed] * batch, batch), none, child, jnp.zeros(batch))
        token, _ = kernel(rows, x, stats, last, logq)
        own = jnp.arange(batch) * nodes + node
        np.testing.assert_array_equal(token // 2, own)
        assert bool(jnp.all((token % 2 == 1) | (child < 0)))


def test_where_nothing_is_left_the_draw_is_from_p():
    """q above reach * p everywhere, or every token refused: the draw is from p itself."""
    vocab = 5
    rows, x = cases.settings(vocab), cases.logits(3, 2, vocab)
    _, kernel, stats_of, draw_plain = passes()
    zero = jnp.zeros(cases.BATCH, jnp.int32)
    everything = jnp.broadcast_to(jnp.arange(vocab), (cases.BATCH, vocab))
    for child, refused, logq in (
        (-1, everything, None),
        (1, everything * 0 - 1, jnp.zeros((cases.BATCH, 2, vocab))),
    ):
        last = reference.LastDraw(zero, cases.row_keys(1), refused, zero + child, jnp.zeros(cases.BATCH))
        got, wanted = (run(rows, x, stats_of(rows, x), last, logq) for run in (kernel, draw_plain))
        np.testing.assert_array_equal(got[0], wanted[0])
        assert bool(jnp.all(jnp.isfinite(got[1])))


@pytest.mark.parametrize("vocab", [1, 5, 4097, 128256])
def test_the_words_are_those_of_jax(vocab):
    for key in cases.row_keys(vocab):
        words = jax.random.bits(keys.wrap(key), (2, vocab), jnp.uint32)
        places = jnp.arange(2 * vocab, dtype=jnp.uint32).reshape(2, vocab)
        np.testing.assert_array_equal(words, threefry.bits(*key, places))
        noise = threefry.gumbel(*key, jnp.arange(vocab), vocab)
        np.testing.assert_allclose(noise, keys.gumbel_of_bits(*words), rtol=1e-6, atol=1e-6)


def test_noise_is_that_of_jax_to_the_ends_of_its_range():
    words = np.array([0, 1, 511, 512, 1 << 31, (1 << 31) - 1, (1 << 32) - 512, (1 << 32) - 1], np.uint32)
    high, low = np.meshgrid(words, words)
    first, second = ((part >> 9) * 2.0**-23 for part in (high, low))
    u = np.where(first >= 0.5, first, first + second * 2.0**-23 + 2.0**-47)  # in float64
    np.testing.assert_allclose(
        keys.gumbel_of_bits(*map(jnp.asarray, (high, low))), -np.log(-np.log1p(-u)), rtol=1e-6, atol=2e-6
    )


def test_limits():
    rows = cases.settings(8)
    with pytest.raises(JspecError, match="float16"):
        row_stats_tpu(rows, cases.logits(0, 2, 8, jnp.float16))
    with pytest.raises(JspecError, match="MiB of VMEM"):
        jax.eval_shape(row_stats_tpu, rows, jax.ShapeDtypeStruct((cases.BATCH, 8, 4_000_000), jnp.float32))
