"""Layers that model families share, and the description of a weight.

`attend` is the plain form of verification attention: a kernel with the same signature
takes its place through ``make(config, attend=...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.errors import JspecError
from jspec.types import Params


@dataclass(frozen=True)
class Weight:
    """One parameter: its shape here, its logical axes, and where a checkpoint has it.

    Not a pytree, so a tree of `Weight` has the structure of the params it describes.
    ``transpose``: the file stores ``[out, in]`` and we multiply by ``[in, out]``. ``parts``: what
    lies side by side along the last axis, where a checkpoint has several tensors for it.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: str
    transpose: bool = False
    parts: tuple[Weight, ...] = ()

    @property
    def stored(self) -> tuple[Weight, ...]:
        """The weights as a checkpoint has them."""
        return self.parts or (self,)


def random_params(weights: Any, seed: int = 0, scale: float = 0.4, dtype: Any = jnp.float32) -> Params:
    """Random params with the structure and the shapes of a weight description.

    Norm weights (all vectors) are around 1.
    """
    leaves, structure = jax.tree.flatten(weights)
    rng = np.random.default_rng(seed)
    arrays = [
        jnp.asarray(scale * rng.standard_normal(leaf.shape) + (len(leaf.shape) == 1), dtype)
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, arrays)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """Root-mean-square normalisation (arXiv 1910.07467), in float32."""
    return _normalise(x, eps).astype(x.dtype) * weight


def rms_norm_around_one(
    x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "*B D"]:
    """The same with weights stored as w - 1 and multiplied in float32 (Gemma)."""
    return (_normalise(x, eps) * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def _normalise(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)


def gelu_tanh(x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """GELU (arXiv 1606.08415) in its tanh form."""
    return jax.nn.gelu(x, approximate=True)


def soft_cap(x: Float[Array, "*B"], cap: float) -> Float[Array, "*B"]:
    """Squeeze into (-cap, cap), smoothly (Gemma 2, arXiv 2408.00118)."""
    return cap * jnp.tanh(x / cap)


def head_logits(params: Any, hidden: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
    """Float32 logits of a draft head: by its ``head``, or by ``rows``, an embedding that is the head too."""
    head, formula = (params["rows"], "btd,wd->btw") if "rows" in params else (params["head"], "btd,dw->btw")
    return jnp.einsum(formula, hidden, head, preferred_element_type=jnp.float32)


def visible_slots(
    length: Int[Array, "B"],
    rows: int,
    slots: int,
    mask: Bool[Array, "B T R"] | None,
    window: int | None = None,
    depth: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B T S"]:
    """Which slots each row sees: all committed ones, and the scratch rows of its path.

    The rows are the last T of the R scratch rows that stand after ``length``. With a
    ``window`` the slots are a ring (`jspec.cache.dense`), and of those a row sees the ones whose
    position is less than ``window`` before its own, ``length + depth`` (default: a chain's).
    """
    # The scratch row that a slot holds; committed entries count down from -1.
    node = jnp.arange(slots) - length[:, None]
    row = jnp.arange(rows)[None]
    scratch = rows if mask is None else mask.shape[2]
    if window is not None:
        if scratch != rows:
            raise JspecError("a layer with a window takes its scratch rows in one pass")
        # A ring slot holds the newest position that falls on it.
        node = rows - 1 - (rows - 1 - node) % slots
        row_depth = row if depth is None else depth
        near = node[:, None, :] > row_depth[:, :, None] - window
        near &= (node + length[:, None] >= 0)[:, None, :]
    if mask is None:
        causal = node[:, None, :] <= row[:, :, None]
        return causal if window is None else causal & near
    if window is not None:
        mask = mask & (row_depth[:, :, None] - row_depth[:, None, :] < window)
    index = jnp.broadcast_to(jnp.clip(node, 0, scratch - 1)[:, None, :], (node.shape[0], rows, slots))
    on_path = jnp.take_along_axis(mask, index, axis=-1) & (node < scratch)[:, None, :]
    committed = jnp.broadcast_to((node < 0)[:, None, :], on_path.shape)
    return jnp.where(committed, True if window is None else near, on_path)


def attend(
    query: Float[Array, "B T H C"],
    keys: Float[Array, "B K S C"],
    values: Float[Array, "B K S C"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B T R"] | None,
    scale: float,
    *,
    window: int | None = None,
    depth: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H C"]:
    """Attention of T scratch rows over a cache that already holds them after ``length``.

    H / K query heads share a kv head; softmax in float32. ``mask = None``: a chain; else
    the rows are the last T of R scratch rows, and it says which of these each may see.
    ``window``: the slots are a ring, of which a row at ``length + depth`` sees so many
    positions, its own included. ``softcap``: of the scaled scores.
    """
    batch, rows, heads, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    grouped = query.reshape(batch, rows, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgc,bksc->bkgts", grouped, keys, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    visible = visible_slots(length, rows, slots, mask, window, depth)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    # Rows first, "btkgc", would make XLA on CPU copy the values, transposed, in every pass.
    mixed = jnp.einsum("bkgts,bksc->bkgtc", weights.astype(values.dtype), values)
    return jnp.moveaxis(mixed, 3, 1).reshape(batch, rows, heads, head_dim)
