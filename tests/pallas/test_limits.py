"""How many bytes the kernels may move, by the count of `tools.traffic`; at real shapes where quick."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jspec import tree
from jspec.cache.dense import Entry
from jspec.pallas.attention.gpu import attend_gpu
from jspec.pallas.attention.tpu import attend_tpu
from jspec.pallas.commit.gpu import compact_gpu
from jspec.pallas.commit.tpu import compact_tpu
from jspec.pallas.verify import fused, reference
from jspec.pallas.verify.gumbel_argmax_gpu import gumbel_argmax_gpu
from jspec.pallas.verify.gumbel_argmax_tpu import gumbel_argmax_tpu
from jspec.pallas.verify.row_stats_gpu import row_stats_gpu
from jspec.pallas.verify.row_stats_tpu import row_stats_tpu
from jspec.sampling import keys, policy, verifiers
from jspec.types import History, Proposal
from tools import traffic


def abstract(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.slow  # every operation of the plain code around the kernels is compiled by itself
@pytest.mark.parametrize(("batch", "drawn"), [(1, False), (8, True)])
def test_the_fused_verifier_moves_little_more_than_the_logits(batch, drawn):
    """At most 1.3 x the logits, those of the draft included where it has some (plain jnp: 11.4 x)."""
    vocab, nodes = 1024, 5
    settings = policy.make(batch, vocab, temperature=1.0, top_p=0.9)
    ones = jnp.ones(batch, jnp.int32)
    history = History(jnp.zeros((batch, 16), jnp.int32), 5 * ones, 5 * ones, -ones[:, None])
    x = jax.random.normal(jax.random.key(0), (batch, nodes, vocab))
    logq = jax.nn.log_softmax(-x) if drawn else None  # the draft likes what the target does not
    proposal = Proposal(jnp.argmin(x, axis=-1), tree.chain(batch, nodes), nodes * ones, logq)
    decide = fused.make(row_stats_tpu, gumbel_argmax_tpu)
    row_keys = keys.row_keys(range(batch), batch)

    def verdict(*arrays):
        return decide(verifiers.token, *arrays, depth=nodes - 1)

    moved = traffic.count(verdict, settings, history, row_keys, 4 * ones, proposal, x, results=True)
    least = x.nbytes * (1 + 1 / nodes)  # every row, and the last one of each sequence once more
    assert least <= moved.total <= 1.3 * (x.nbytes + (logq.nbytes if drawn else 0))
    if drawn:
        assert moved.total > least * 1.1  # a draft was refused, and its distribution read


@pytest.mark.parametrize(("dtype", "nodes"), [(jnp.float32, 5), (jnp.bfloat16, 7)])
@pytest.mark.parametrize("child", [-1, 3])
def test_the_two_passes_of_fused_verification(child, dtype, nodes):
    """The same at the real vocabulary: the first reads each logit once, the second one row a sequence.

    In bfloat16 two rows, which share words: 1 + 2 / N of the logits by both.
    """
    batch, vocab = 8, 128256
    settings = policy.make(batch, 2, top_p=0.9)  # kernels look at no bias
    ones, x = jnp.ones(batch, jnp.int32), abstract(batch, nodes, vocab, dtype=dtype)
    first = traffic.count(row_stats_tpu, settings, x)
    logits, row = batch * nodes * vocab * x.dtype.itemsize, batch * vocab * 4  # of bfloat16 two rows
    assert logits <= first.read <= logits + 32 * batch * nodes and first.written <= 32 * batch * nodes
    stats = reference.RowStats(*[jnp.zeros((batch, nodes))] * 3, jnp.zeros((batch, nodes), jnp.int32))
    last = reference.LastDraw(
        2 * ones, jnp.zeros((batch, 2), jnp.uint32), -ones[:, None], child * ones, 0.0 * ones
    )
    second = traffic.count(gumbel_argmax_tpu, settings, x, stats, last, x)
    assert row <= second.read <= 1.01 * row * (2 if child >= 0 else 1)
    assert first.total + second.total <= 1.3 * logits * (2 if child >= 0 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_two_passes_on_hopper(dtype):
    """Once more the same (where lanes keep enough: `test_how_often_a_row_is_read`)."""
    batch, nodes, vocab = 2, 5, 128256
    settings = policy.make(batch, 2)
    ones, x = jnp.ones(batch, jnp.int32), abstract(batch, nodes, vocab, dtype=dtype)
    first = traffic.count(row_stats_gpu, settings, x)
    row = vocab * x.dtype.itemsize
    assert batch * nodes * row <= first.read <= 1.04 * batch * nodes * row
    stats = reference.RowStats(*[jnp.zeros((batch, nodes))] * 3, jnp.zeros((batch, nodes), jnp.int32))
    last = reference.LastDraw(2 * ones, jnp.zeros((batch, 2), jnp.uint32), -ones[:, None], -ones, 0.0 * ones)
    second = traffic.count(gumbel_argmax_gpu, settings, x, stats, last)
    assert batch * row <= second.read <= 1.04 * batch * row
    assert first.total + second.total <= 1.3 * batch * nodes * row


@pytest.mark.parametrize(
    "kernel", [attend_tpu, pytest.param(attend_gpu, marks=pytest.mark.slow)], ids=["tpu", "gpu"]
)
def test_attention_reads_the_cache_once_for_all_rows(kernel):
    """Eight rows at 8k context: at most 1.15 x the bytes of one row, and no slot beyond the length."""

    def moved(rows: int, length: int) -> int:
        def attend(query, keys, values, length):
            return kernel(query, keys, values, length, None, 128**-0.5)

        query, cache = abstract(1, rows, 32, 128), abstract(1, 8, 8192, 128)
        return traffic.count(attend, query, cache, cache, jnp.array([length])).total

    entry = 2 * 8 * 128 * 2  # bytes of a slot's keys and values
    assert entry * 8000 <= moved(1, 8000)
    assert moved(8, 8000) <= 1.15 * moved(1, 8000)
    assert moved(8, 8000) <= 1.15 * entry * 8192
    assert moved(8, 1000) <= 0.3 * moved(8, 8000)


@pytest.mark.parametrize(("kernel", "tile"), [(compact_tpu, 16), (compact_gpu, 1)])
def test_the_commit_moves_the_path_alone(kernel, tile):
    """At most a tile from its old place and one to its new place for each entry that moves."""
    cache = tuple(Entry(*[abstract(1, 8, 8192, 128)] * 2) for _ in range(4))
    path, entry = jnp.array([[0, 2, 5, 6, 9, 0, 0, 0]]), 8 * 8 * 128 * 2  # 8 buffers of 8 heads
    moved = traffic.count(kernel, cache, path, jnp.array([8000]))
    assert 4 * entry <= moved.written <= 4 * entry * tile
    assert 4 * entry <= moved.read <= 2 * 4 * entry * tile + 8 * 128
    nothing = traffic.count(kernel, cache, jnp.arange(8)[None], jnp.array([8000]))
    assert nothing.total <= 8 * 128  # lengths and paths, read by each program
