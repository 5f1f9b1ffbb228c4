"""Random rounds for fused verification: proposals of every kind, with mixed settings in a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.sampling import keys, policy
from jspec.types import Proposal

SETTINGS = dict(
    temperature=[0.0, 1.0, 0.7, 1.3, 1.0, 0.9],
    top_k=[0, 0, 5, 0, 7, 0],
    top_p=[1.0, 1.0, 1.0, 0.8, 0.9, 1.0],
    min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.1],
)
BATCH = len(SETTINGS["temperature"])


def settings(vocab: int, **more) -> policy.Policy:
    return policy.make(BATCH, vocab, **SETTINGS, **more)


def history(vocab: int, slots: int = 12) -> policy.History:
    draw = np.random.default_rng(5)
    tokens = jnp.asarray(draw.integers(0, vocab, (BATCH, slots)))
    length = jnp.asarray(draw.integers(2, slots, BATCH))
    return policy.History(tokens, length, length - 1, jnp.full((BATCH, 1), 3))


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


def row_keys(seed: int) -> jax.Array:
    return keys.row_keys([seed + i for i in range(BATCH)], BATCH)
