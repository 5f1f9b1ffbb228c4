"""Layers that model families share, and the description of a weight.

`attend` is the plain form of verification attention: a kernel with the same signature
takes its place through ``make(config, attend=...)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class Weight:
    """One parameter: its shape here, its logical axes, and where a checkpoint has it.

    Not a pytree, so a tree of `Weight` has the structure of the params it describes.
    ``transpose``: the file stores ``[out, in]`` and we multiply by ``[in, out]``.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: str
    transpose: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864), in the half-split layout.

    ``kind``: "default", "linear" (positions divided by ``factor``) or "llama3"
    (low frequencies divided, high ones kept, a ramp between; Llama 3.1).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192


def rope_frequencies(rope: Rope, channels: int) -> Float[Array, "half"]:
    """Radians a position for each channel pair, in float32."""
    exponent = jnp.arange(0, channels, 2, dtype=jnp.float32) / channels
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_length * frequency / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequency * (keep + (1 - keep) / rope.factor)
    return frequency


def rotate(
    x: Float[Array, "B T H C"], position: Int[Array, "B T"], frequency: Float[Array, "half"]
) -> Float[Array, "B T H C"]:
    """Turn each channel pair (c, c + C/2) by ``position * frequency``."""
    angle = position[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


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
    ``window`` the slots are a ring (`jspec.cache`), and of those a row sees the ones whose
    position is less than ``window`` before its own, ``length + depth`` (default: a chain's).
    """
    # The scratch row that a slot holds; committed entries count down from -1.
    node = jnp.arange(slots) - length[:, None]
    row = jnp.arange(rows)[None]
    scratch = rows if mask is None else mask.shape[2]
    if window is not None:
        if scratch != rows:
            raise ValueError("a layer with a window takes its scratch rows in one pass")
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
    batch, rows, heads, channels = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    grouped = query.reshape(batch, rows, kv_heads, heads // kv_heads, channels)
    scores = jnp.einsum("btkgc,bksc->bkgts", grouped, keys, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    visible = visible_slots(length, rows, slots, mask, window, depth)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    # Rows first, "btkgc", would make XLA on CPU copy the values, transposed, in every pass.
    mixed = jnp.einsum("bkgts,bksc->bkgtc", weights.astype(values.dtype), values)
    return jnp.moveaxis(mixed, 3, 1).reshape(batch, rows, heads, channels)
