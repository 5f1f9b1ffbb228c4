"""A closed-form toy distribution: the next token depends on the last few tokens by a table.

For tests and notebooks, where the distribution of every text has to be known exactly. It keeps
the whole `Model` contract: ragged rows, scratch writes, trees, commits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import ragged
from jspec.once import built_once
from jspec.tree import earlier_rows
from jspec.types import Model, Params, Tree


class TextCache(NamedTuple):
    """The text itself: all that a distribution of finite order needs."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]


@built_once
def make(vocab_size: int, order: int = 1, context_length: int = 1 << 20) -> Model:
    """Build the `Model` of a table.

    Params: logits of shape ``[V + 1] * order + [V]``, indexed by the last ``order``
    tokens, oldest first; index V stands for "before the text began".

    >>> import jax
    >>> params = jnp.log(jnp.array([[.1, .9], [.8, .2], [.5, .5]]))
    >>> model = make(vocab_size=2)
    >>> cache = model.init_cache(1, 4)
    >>> tree = Tree(jnp.array([[-1]]), jnp.array([[0]]))
    >>> hidden, _, cache = model.forward(params, cache, jnp.array([[1]]), tree)
    >>> jnp.exp(model.unembed(params, hidden)).round(2).tolist()
    [[[0.8..., 0.2...]]]
    """

    def init_cache(batch: int, slots: int, scratch: int | None = None) -> TextCache:
        return TextCache(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def forward(params: Params, cache: TextCache, tokens: Int[Array, "B T"], tree: Tree):
        batch, rows = tokens.shape
        first = cache.length + earlier_rows(tree)
        written = ragged.append(cache.tokens, first, tokens, jnp.full((batch,), rows))
        start = first[:, None]
        slot = start + jnp.arange(rows)
        context = []
        for _ in range(order):
            token = jnp.take_along_axis(written, jnp.clip(slot, 0), axis=1)
            context.append(jnp.where(slot >= 0, token, vocab_size))
            parent = jnp.take_along_axis(tree.parent, jnp.clip(slot - start, 0, rows - 1), axis=1)
            above = jnp.where(parent >= 0, start + parent, start - 1)
            slot = jnp.where(slot >= start, above, slot - 1)
        hidden = params[tuple(reversed(context))]
        return hidden, hidden[..., :0], TextCache(written, cache.length)

    def commit(cache: TextCache, path: Int[Array, "B P"] | None, count: Int[Array, "B"]) -> TextCache:
        if path is None:
            return cache._replace(length=cache.length + count)
        kept = jnp.take_along_axis(cache.tokens, cache.length[:, None] + path, axis=1)
        return TextCache(ragged.append(cache.tokens, cache.length, kept, count), cache.length + count)

    def unembed(params: Params, hidden: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        return hidden.astype(jnp.float32)

    return Model(init_cache, forward, commit, unembed, vocab_size, context_length)
