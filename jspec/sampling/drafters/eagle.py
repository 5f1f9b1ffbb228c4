"""EAGLE: a head that goes on from the target's own hidden states (1, 2 and 3 alike).

EAGLE-1 (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) differ in their `Head`; EAGLE-2
(arXiv 2406.16858) is the growth `jspec.sampling.grow.best_first`. Row j of the head takes the feature f_j and
the token x_{j+1}: the emitted tokens come with just these features, so taking them in is
the head's roll-forward, with the target's true features in the place of its own guesses.
x_0 has no feature and is dropped; before the first feature nothing is proposed.

After it the last row's logits are those of the root's children, so depth 1 costs no pass.
A drafted row takes the stream of its parent. Static: the head, the growth, V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.errors import JspecError
from jspec.models.heads import Head
from jspec.once import built_once
from jspec.sampling import grow
from jspec.tree import TreeShape
from jspec.types import Context, Drafter, Emitted, Params, Proposal, Tree


class Rows(NamedTuple):
    """The head's side of a row."""

    cache: Any  # of every pair (f_j, x_{j+1}) so far
    begun: Bool[Array, "B"]  # x_0 has been seen
    stream: Float[Array, "B D"]  # of the last pair
    logits: Float[Array, "B W"]  # of the token after it


class Drafted(NamedTuple):
    """What a proposal carries from pass to pass."""

    cache: Any
    streams: Float[Array, "B R D"]  # of the root's row and of those run since


@built_once
def eagle_static(head: Head, shape: TreeShape, *, vocab_size: int, drawn: bool = True) -> Drafter:
    """A drafter of a static chain or tree, which an EAGLE head writes. Params: the head's.

    Args:
        head: the network, `jspec.models.heads.Head`.
        shape: of the drafts: `jspec.tree.chain_shape`, `from_paths`, `likeliest`, or `EAGLE_TREE`.
        vocab_size: the target's V.
        drawn: tokens of rows above temperature 0 are drawn from the head's distribution under the
            target's policy, siblings without replacement; False: always the head's best, as point
            masses.

    >>> from jspec import tree
    >>> from jspec.certify import tiny
    >>> from jspec.weights.heads import eagle1
    >>> _, _, head, params = tiny.tiny_head(eagle1.KIND)
    >>> drafter = eagle_static(head, tree.chain_shape(3), vocab_size=5)
    >>> drafter.growth, drafter.nodes
    ('chain', 4)
    """

    def grown(writer: grow.Writer, start: grow.Start, root: Array, context: Context) -> Proposal:
        return grow.fixed(shape, writer, start, root, context, drawn)

    inner = sum(len(shape.inner(level)) for level in range(1, shape.depth))
    growth = "chain" if shape.is_chain else "tree"
    return _drafter(head, vocab_size, grown, len(shape.parent), shape.depth, inner, growth)


@built_once
def eagle_dynamic(head: Head, *, size: int = 31, depth: int = 6, topk: int = 8, vocab_size: int) -> Drafter:
    """A drafter of a tree that grows where an EAGLE head is surest (EAGLE-2). Params: the head's.

    Args:
        head: the network, `jspec.models.heads.Head`.
        size: drafted nodes, the root not counted.
        depth: levels, at most.
        topk: nodes of a level that are run, and children of each that are candidates.
        vocab_size: the target's V.

    Raises:
        JspecError: the levels do not propose so many candidates.

    >>> from jspec.certify import tiny
    >>> from jspec.weights.heads import eagle1
    >>> _, _, head, params = tiny.tiny_head(eagle1.KIND)
    >>> drafter = eagle_dynamic(head, size=7, depth=3, topk=2, vocab_size=5)
    >>> drafter.growth, drafter.nodes
    ('tree', 8)
    """
    if size > (most := topk + (depth - 1) * topk**2):
        raise JspecError(f"size = {size}, but {depth} levels of {topk} x {topk} make {most} candidates")

    def grown(writer: grow.Writer, start: grow.Start, root: Array, context: Context) -> Proposal:
        return grow.best_first(size, depth, topk, writer, start, root)

    return _drafter(head, vocab_size, grown, size + 1, depth, topk * (depth - 1), "tree")


def _drafter(
    head: Head, vocab: int, grown: Callable[..., Proposal], nodes: int, depth: int, rows: int, growth: str
) -> Drafter:
    """``rows``: how many the head runs for a proposal."""

    def init(params: Params, batch: int, slots: int, scratch: int) -> Rows:
        return Rows(
            head.init_cache(batch, slots + rows, max(scratch, rows)),
            jnp.zeros((batch,), bool),
            jnp.zeros((batch, head.hidden_size), params["embed"].dtype),
            jnp.zeros((batch, head.vocab_size), jnp.float32),
        )

    def absorb(params: Params, state: Rows, emitted: Emitted) -> Rows:
        first = (~state.begun & (emitted.count > 0))[:, None]  # x_0 is dropped
        index = jnp.minimum(jnp.arange(emitted.tokens.shape[1]) + first, emitted.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(emitted.tokens, index, axis=1)
        features = jnp.take_along_axis(emitted.features, index[:, :, None], axis=1)
        count = emitted.count - first[:, 0]
        stream = head.fuse(params, features.astype(state.stream.dtype))
        hidden, stream, cache = head.forward(params, state.cache, tokens, stream, _chain(tokens))
        last = jnp.maximum(count - 1, 0)[:, None, None]
        logits = head.unembed(params, jnp.take_along_axis(hidden, last, axis=1))[:, 0]
        new = (count > 0)[:, None]
        return Rows(
            head.commit(cache, None, count),
            state.begun | (emitted.count > 0),
            jnp.where(new, jnp.take_along_axis(stream, last, axis=1)[:, 0], state.stream),
            jnp.where(new, logits, state.logits),
        )

    def propose(
        params: Params, state: Rows, root: Int[Array, "B"], context: Context
    ) -> tuple[Proposal, Rows]:
        def run(carry: Drafted, tokens: Array, above: Array, layout: Tree) -> tuple[Array, Drafted]:
            stream = jnp.take_along_axis(carry.streams, above[:, :, None] + 1, axis=1)
            hidden, stream, cache = head.forward(params, carry.cache, tokens, stream, layout)
            streams = jnp.concatenate([carry.streams, stream], axis=1)
            return head.unembed(params, hidden), Drafted(cache, streams)

        writer = grow.Writer(run, params.get("ids"), vocab)
        start = grow.Start(state.logits, Drafted(state.cache, state.stream[:, None]))
        proposal = grown(writer, start, root, context)
        ready = state.cache.length > 0
        return proposal._replace(count=jnp.where(ready, proposal.count, 1)), state

    return Drafter(init, absorb, propose, nodes=nodes, depth=depth, growth=growth)


def _chain(tokens: Int[Array, "B T"]) -> Tree:
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Tree(index - 1, index)
