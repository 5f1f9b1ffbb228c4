"""Random rounds for fused verification: proposals of every kind, with mixed settings in a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.pallas.verify import reference
from jspec.sampling import keys, policy
from jspec.types import History, Policy, Proposal

SETTINGS = dict(
    temperature=[0.0, 1.0, 0.7, 1.3, 1.0, 0.9],
    top_k=[0, 0, 5, 0, 7, 0],
    top_p=[1.0, 1.0, 1.0, 0.8, 0.9, 1.0],
    min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.1],
)
BATCH = len(SETTINGS["temperature"])


def settings(vocab: int, **more) -> Policy:
    return policy.make(BATCH, vocab, **SETTINGS, **more)


def history(vocab: int, slots: int = 12) -> History:
    draw = np.random.default_rng(5)
    tokens = jnp.asarray(draw.integers(0, vocab, (BATCH, slots)))
    length = jnp.asarray(draw.integers(2, slots, BATCH))
    return History(tokens, length, length - 1, jnp.full((BATCH, 1), 3))


def logits(seed: int, nodes: int, vocab: int, dtype=jnp.float32) -> jax.Array:
    return (3 * jax.random.normal(jax.random.key(seed), (BATCH, nodes, vocab))).astype(dtype)


def proposal(seed: int, nodes: int, vocab: int, *, tree_of: bool, drawn: bool) -> Proposal:
    """Tokens near the likely ones, so that walks go down; counts differ between rows."""
    draw = np.random.default_rng(seed)
    tokens = jnp.asarray(draw.integers(0, min(vocab, 3), (BATCH, nodes)))
    if tree_of:
        parent = [[-1] + [int(draw.integers(0, i)) for i in range(1, nodes)] for _ in range(BATCH)]
        layout = tree.from_parents(jnp.asarray(parent))
    else:
        layout = tree.chain(BATCH, nodes)
    count = jnp.asarray([1 + i % nodes if i % 2 else nodes for i in range(BATCH)])
    logq = None
    if drawn:
        logq = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(seed + 1), (BATCH, nodes, vocab)))
    return Proposal(tokens, layout, count, logq)


def with_foreign_ids(proposal: Proposal, seed: int, vocab: int) -> tuple[Proposal, Proposal]:
    """The proposal with ids that are no tokens at some nodes, and what it means: one without these nodes."""
    draw = np.random.default_rng(seed)
    foreign = draw.random(proposal.tokens.shape) < 0.25
    foreign[0], foreign[:, 0] = True, False  # all drafts of the first row, and no root
    ids = jnp.asarray(draw.choice([-1, vocab, vocab + 3, -(2**31), 2**31 - 1], proposal.tokens.shape))
    given = proposal._replace(tokens=jnp.where(foreign, ids, proposal.tokens))
    if proposal.tree.mask is None:
        first = np.where(foreign.any(axis=1), foreign.argmax(axis=1), foreign.shape[1])
        return given, proposal._replace(count=jnp.minimum(proposal.count, first))
    parent = np.array(proposal.tree.parent)
    for row, node in np.argwhere(foreign):
        parent[row, node] = -1
    return given, proposal._replace(tree=proposal.tree._replace(parent=jnp.asarray(parent)))


def row_keys(seed: int) -> jax.Array:
    return keys.row_keys([seed + i for i in range(BATCH)], BATCH)


def hard(seed: int, nodes: int, vocab: int, dtype) -> jax.Array:
    """Logits with ties in the first of several rows, and in the last one what is hard or no distribution."""
    x = np.array(logits(seed, nodes, vocab))
    if nodes > 1:
        x[:, 0] = np.round(x[:, 0])
        x[0, -1, vocab // 2] = np.nan
        x[1, -1, vocab // 3] = np.inf
        x[2, -1] = -np.inf
        x[3, -1, vocab // 2 :] = x[3, -1, 0] - 200
        x[3, -1, 1::2] = -np.inf
        x[4, -1] = 7.25
        x[5, -1] = np.where(np.arange(vocab) % 3 == 0, -0.0, 0.0)
    return jnp.asarray(x, dtype)


def check_row_stats(policy, x, got: reference.RowStats, wanted: reference.RowStats) -> None:
    x = np.asarray(x, np.float64)
    np.testing.assert_array_equal(got.top, wanted.top)
    np.testing.assert_array_equal(got.best, wanted.best)
    for row, node in np.argwhere(np.isfinite(wanted.top)):
        temperature, k, p, min_p = (float(part[row]) for part in policy[:4])
        if temperature == 0:
            continue
        cut = float(got.cut[row, node])
        if k > 0 and p == 1:
            assert cut == wanted.cut[row, node]
        weight = np.exp((x[row, node] - x[row, node].max()) / temperature)
        kept = weight * (x[row, node] >= cut)
        if p < 1:  # the definition: rounding may move the cut by an id that hardly matters
            least = np.sort(x[row, node])[-min(int(k), x.shape[2])] if k else -np.inf
            whole = weight[x[row, node] >= least].sum()
            assert cut >= least
            assert kept.sum() >= (p - 1e-6) * whole
            assert weight[x[row, node] > cut].sum() < (p + 1e-6) * whole
        total = kept[weight >= min_p * (1 - 1e-6)].sum()
        assert np.log(total) == pytest.approx(float(got.log_total[row, node]), rel=1e-5, abs=1e-5)
