"""A causal language model written in Flax NNX, as a `Model`.

The module needs no knowledge of ragged rows, trees or rollback. Two forms:

* **Without a cache**, any module that maps tokens, positions and a mask to logits. The
  text is the cache, and every pass runs all of it again: right, and slow.
* **With a cache** of its own, as Flax's Gemma has it. The module writes the T new entries
  of every row into the SAME slots, ``start`` to ``start + T - 1`` (a plain
  dynamic_update_slice), and attends where the mask says. Those slots are a scratch area
  behind the committed ones; `commit` moves what is kept to each row's own end, an
  accepted path's T entries a layer. So lengths differ between rows while the module sees
  one index.

Positions come as an argument, and slots are not in their order: a module that derives
either, or a sliding window, from slot numbers is wrong here.

The split of the module is static, its state the params: always an argument. What a call
changes in the module (counters, sown values) is dropped. S slots are committed ones, W
scratch ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec import ragged
from jspec.errors import JspecError, optional
from jspec.models.table import TextCache
from jspec.tree import earlier_rows
from jspec.types import Model, Params, Tree


class ModuleCache(NamedTuple):
    """The module's own cache: S slots for committed entries, then W for scratch.

    ``layout`` has no elements: its shape says S and W, statically, wherever the cache goes.
    """

    entries: Any
    length: Int[Array, "B"]  # committed entries
    layout: Float[Array, "S W 0"]


def from_nnx(
    module: Any,
    *,
    vocab_size: int,
    context_length: int,
    call: Callable[..., Any] | None = None,
    init_cache: Callable[[int, int], Any] | None = None,
    unembed: Callable[[Any, Array], Array] | None = None,
    tokens_only: bool = False,
    slot_axis: int = 1,
) -> tuple[Model, Params]:
    """Wrap an ``nnx.Module``; gives the `Model` and its params (``nnx.state(module)``).

    Args:
        module: the language model. It is run in evaluation mode (no dropout), whatever
            mode it is in, and is not changed.
        vocab_size: V; logits beyond it are cut off.
        context_length: positions the module was made for; none beyond is ever asked for.
        call: without ``init_cache``, ``call(module, tokens_BS, positions_BS, mask_BSS) ->
            hidden_BSD`` (default: the module itself); with it, ``call(module, tokens_BT,
            positions_BT, mask_BTS, cache, start) -> (hidden_BTD, cache)``, where ``start`` is
            an integer, the same for all rows, traced where a draft writes token by token.
            ``mask[b, t, s]``: row t sees slot s.
        init_cache: ``init_cache(batch, slots)``: the empty cache, a pytree of arrays with the
            batch first and the slots at ``slot_axis``; arrays of fewer axes (counters) are
            left to ``call``.
        unembed: ``unembed(module, hidden) -> logits``; default: hidden are the logits.
        tokens_only: ``call`` takes tokens alone and is causal by itself. Trees are then
            refused, with `JspecError`.

    New weights need no new `Model`: ``nnx.state(module)`` after training fits it.

    >>> from flax import nnx
    >>> from jspec.tree import chain
    >>> class Bigram(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.table = nnx.Embed(5, 5, rngs=rngs)
    ...     def __call__(self, tokens, positions, mask):
    ...         return self.table(tokens)
    >>> bigram = Bigram(nnx.Rngs(0))
    >>> bigram.table.embedding[...] = jnp.eye(5)[jnp.array([1, 2, 3, 4, 0])]
    >>> model, params = from_nnx(bigram, vocab_size=5, context_length=64)
    >>> cache = model.init_cache(batch=1, slots=8)
    >>> hidden, _, cache = jax.jit(model.forward)(params, cache, jnp.array([[0, 1, 2]]), chain(1, 3))
    >>> model.unembed(params, hidden).argmax(-1).tolist()
    [[1, 2, 3]]
    """
    nnx = optional("flax.nnx", "flax")
    graph, state = nnx.split(module)
    params = jax.tree.map(lambda leaf: leaf, state)  # else training would change it in place
    run = call or (lambda module, *arguments: module(*arguments))

    def merged(params: Params) -> Any:
        # Without a copy, a module that counts its calls would write into params.
        copy = nnx.merge(graph, params, copy=True)
        copy.eval()
        return copy

    def logits(params: Params, hidden: Array) -> Array:
        values = hidden if unembed is None else unembed(merged(params), hidden)
        return values[..., :vocab_size].astype(jnp.float32)

    def safe(tokens: Array, positions: Array) -> tuple[Array, Array]:
        # Looking up what is not there gives NaN, which spreads even from rows that nobody sees.
        return jnp.clip(tokens, 0, vocab_size - 1), jnp.clip(positions, 0, context_length - 1)

    def on_text(params: Params, tokens: Array, positions: Array, mask: Array) -> Array:
        tokens, positions = safe(tokens, positions)
        return run(merged(params), tokens) if tokens_only else run(merged(params), tokens, positions, mask)

    def on_entries(params: Params, tokens: Array, positions: Array, *rest: Any) -> tuple[Array, Any]:
        return run(merged(params), *safe(tokens, positions), *rest)

    if init_cache is None:
        parts = _text(on_text, tokens_only)
    elif tokens_only:
        raise JspecError("tokens_only is for modules without a cache: give no init_cache")
    else:
        parts = _entries(on_entries, init_cache, slot_axis)
    return Model(*parts, logits, vocab_size, context_length), params


def _text(run: Callable[..., Array], chains_only: bool) -> tuple[Callable, Callable, Callable]:
    """``init_cache``, ``forward`` and ``commit`` with the text as the cache."""

    def init_cache(batch: int, slots: int, scratch: int | None = None) -> TextCache:
        return TextCache(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def forward(params: Params, cache: TextCache, tokens: Int[Array, "B T"], tree: Tree):
        if chains_only and tree.mask is not None:
            raise JspecError("a module that takes tokens only cannot run over a tree: let it take a mask")
        slots, length = cache.tokens.shape[1], cache.length
        start = length + earlier_rows(tree)
        written = ragged.append(cache.tokens, start, tokens, jnp.full_like(length, tokens.shape[1]))
        depth, seen = _whole_tree(tree)
        # To the rows of a chain those of its earlier passes are as good as committed.
        before = start if tree.mask is None else length
        hidden = run(params, written, *_places(before, slots, depth, seen))
        index = jnp.minimum(start[:, None] + jnp.arange(tokens.shape[1]), slots - 1)
        hidden = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
        return hidden, hidden[..., :0], TextCache(written, length)

    def commit(cache: TextCache, path: Int[Array, "B P"] | None, count: Int[Array, "B"]) -> TextCache:
        if path is None:
            return cache._replace(length=cache.length + count)
        kept = jnp.take_along_axis(cache.tokens, cache.length[:, None] + path, axis=1)
        return TextCache(ragged.append(cache.tokens, cache.length, kept, count), cache.length + count)

    return init_cache, forward, commit


def _whole_tree(tree: Tree) -> tuple[Int[Array, "B R"], Bool[Array, "B R R"]]:
    """Depth and mask of all R scratch rows, of which a tree in several passes has the last.

    An earlier row sees of itself and those before it what the rows that see it see. One
    that nobody sees does not matter, as long as it sees something.
    """
    if tree.mask is None:
        rows = tree.depth.shape[1]
        return tree.depth - tree.depth[:, :1], jnp.broadcast_to(
            jnp.tri(rows, dtype=bool), (*tree.depth.shape, rows)
        )
    rows = tree.mask.shape[2]
    earlier = rows - tree.mask.shape[1]
    both = jnp.any(tree.mask[:, :, :earlier, None] & tree.mask[:, :, None, :], axis=1)
    above = (both & jnp.tri(earlier, rows, dtype=bool)) | jnp.eye(earlier, rows, dtype=bool)
    depth = jnp.concatenate([above.sum(-1) - 1, tree.depth], axis=1)
    return depth, jnp.concatenate([above, tree.mask], axis=1)


def _places(
    length: Int[Array, "B"], slots: int, depth: Int[Array, "B R"], seen: Bool[Array, "B R R"]
) -> tuple[Int[Array, "B S"], Bool[Array, "B S S"]]:
    """Position of every slot, and what it sees: the text is a chain, scratch rows follow it."""
    rows = depth.shape[1]
    slot = jnp.arange(slots)
    node = slot - length[:, None]
    scratch, index = (node >= 0) & (node < rows), jnp.clip(node, 0, rows - 1)
    position = jnp.where(scratch, length[:, None] + jnp.take_along_axis(depth, index, axis=1), slot)
    tree = jnp.take_along_axis(seen, index[:, :, None], axis=1)
    tree = jnp.take_along_axis(tree, index[:, None, :], axis=2)
    causal = slot <= slot[:, None]
    inside = scratch[:, :, None] & scratch[:, None, :]
    return position, jnp.where(inside, tree, causal)


def _entries(
    run: Callable[..., tuple[Array, Any]], new_cache: Callable[[int, int], Any], axis: int
) -> tuple[Callable, Callable, Callable]:
    """The same with the module's own cache."""

    def init_cache(batch: int, slots: int, scratch: int | None = None) -> ModuleCache:
        # One row alone would be written as XLA writes it best elsewhere: see jspec.cache.dense.
        spare = slots if scratch is None else max(scratch, 2)
        entries = new_cache(batch, slots + spare)
        for leaf in jax.tree.leaves(entries):
            if leaf.ndim > axis and (leaf.shape[0], leaf.shape[axis]) != (batch, slots + spare):
                raise JspecError(
                    f"init_cache({batch}, {slots + spare}) gave an array of shape {leaf.shape}: the batch "
                    f"should be its first axis and the slots axis {axis} (slot_axis)"
                )
        return ModuleCache(entries, jnp.zeros((batch,), jnp.int32), jnp.zeros((slots, spare, 0)))

    def forward(params: Params, cache: ModuleCache, tokens: Int[Array, "B T"], tree: Tree):
        # Of a chain alike in all rows.
        earlier = tree.depth[0, 0] if tree.mask is None else earlier_rows(tree)
        start = cache.layout.shape[0] + earlier
        positions = cache.length[:, None] + tree.depth
        visible = _visible(cache, tree)
        hidden, entries = run(params, tokens, positions, visible, cache.entries, start)
        _check_kept(cache.entries, entries)
        return hidden, hidden[..., :0], cache._replace(entries=entries)

    def commit(cache: ModuleCache, path: Int[Array, "B P"] | None, count: Int[Array, "B"]) -> ModuleCache:
        slots, spare, _ = cache.layout.shape
        nodes = jnp.arange(spare)[None] if path is None else path
        # What lies beyond `count` is moved too, behind the new end, where nobody looks.
        target = cache.length[:, None] + jnp.arange(nodes.shape[1])
        source = jnp.broadcast_to(slots + nodes, target.shape)
        entries = jax.tree.map(lambda leaf: _move(leaf, source, target, axis), cache.entries)
        return cache._replace(entries=entries, length=cache.length + count)

    return init_cache, forward, commit


def _visible(cache: ModuleCache, tree: Tree) -> Bool[Array, "B T slots"]:
    """Which of all S + W slots each row sees: the committed ones, and the scratch rows of its path."""
    slots, spare, _ = cache.layout.shape
    batch, rows = tree.depth.shape
    scratch = rows if tree.mask is None else tree.mask.shape[2]
    if scratch > spare:
        raise JspecError(f"{scratch} scratch rows do not fit {spare} scratch slots")
    committed = jnp.arange(slots) < cache.length[:, None, None]
    if tree.mask is None:
        own = jnp.arange(spare) <= tree.depth[:, :, None]
    else:
        own = jnp.pad(tree.mask, ((0, 0), (0, 0), (0, spare - scratch)))
    return jnp.concatenate([jnp.broadcast_to(committed, (batch, rows, slots)), own], axis=-1)


def _move(leaf: Array, source: Int[Array, "B P"], target: Int[Array, "B P"], axis: int) -> Array:
    """Copy each row's slots from source to target; an array without slots stays as it is."""
    if leaf.ndim <= axis:
        return leaf
    batch, count = source.shape
    between, after = [1] * (axis - 1), [1] * (leaf.ndim - axis - 1)
    kept = jnp.take_along_axis(leaf, source.reshape(batch, *between, count, *after), axis=axis)
    place = (jnp.arange(batch)[:, None], *[slice(None)] * (axis - 1), target)
    return leaf.at[place].set(
        jnp.moveaxis(kept, axis, 1), mode="drop", unique_indices=True, indices_are_sorted=True
    )


def _check_kept(before: Any, after: Any) -> None:
    """Raise unless a call gave back a cache of the same structure, shapes and dtypes."""
    old, new = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (before, after))
    if old != new:
        raise JspecError(f"call should give back a cache like the one that it got, {old}, not {new}")
