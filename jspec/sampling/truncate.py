"""Temperature, top-k, top-p and min-p: a row's distribution as two thresholds and a total.

The steps 5 to 8 of `jspec.sampling.policy`. No array of V is kept: a distribution is its logits x and

    log p = (x - top) / temperature - log_total   where x >= cut and p >= min_p * the greatest

so a kernel that finds ``top``, ``cut`` and ``log_total`` (`jspec.pallas`) has found the distribution.
``policy`` is a `jspec.types.Policy`, of which the four settings are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


def each(values: Shaped[Array, "B"]) -> Shaped[Array, "B 1 1"]:
    """One value a row, to meet [B, N, V]."""
    return values[:, None, None]


def any_of(*conditions: Array) -> Bool[Array, ""]:
    """Whether any of the arrays has an entry that is true, or not 0."""
    return jnp.any(jnp.stack([jnp.any(condition) for condition in conditions]))


def greatest(x: Float[Array, "B N V"]) -> Float[Array, "B N 1"]:
    """The greatest logit; NaN, which equals none and spoils all it is subtracted from, in a bad row."""
    # A maximum may overlook NaN (XLA's on CPU does in long rows), so NaN counts as +inf: an error too.
    top = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(top), top, jnp.nan)


def greedy(x: Array, top: Array) -> Array:
    """All mass on the first of the greatest (on CPU `argmax` takes five times as long)."""
    index = jnp.arange(x.shape[-1])
    first = jnp.min(jnp.where(x == top, index, x.shape[-1]), axis=-1, keepdims=True)
    return jnp.where(index == first, jnp.zeros((), x.dtype), -jnp.inf)


def sampled(policy: Any, x: Array, top: Array) -> Array:
    """The distribution of rows whose temperature is not 0."""
    return kept(policy, x, top, *truncate(policy, x, top))


def scale(policy: Any, x: Array, top: Array) -> Array:
    """Over the temperature, and at most 0, so that no temperature is too low for the float's range."""
    sampled = jnp.minimum(policy.temperature, 1e30)  # 1 / it is not 0
    return (x - top) / each(jnp.where(policy.temperature > 0, sampled, 1))


def _total(values: Array) -> Array:
    return jnp.sum(values, axis=-1, keepdims=True, dtype=values.dtype)


def kept(policy: Any, x: Array, top: Array, cut: Array, log_total: Array | float) -> Array:
    """The distribution of sampled rows from what `truncate` found."""
    scaled = scale(policy, x, top)
    return jnp.where((x < cut) | (scaled < jnp.log(each(policy.min_p))), -jnp.inf, scaled) - log_total


def truncate(
    policy: Any, x: Float[Array, "B N V"], top: Float[Array, "B N 1"]
) -> tuple[Float[Array, "B N 1"], Float[Array, "B N 1"]]:
    """Temperature, top-k, top-p and min-p: the least logit that top-k and top-p keep, and the
    logarithm of what is kept after min-p, relative to ``top``. A threshold a row, not an array of V."""
    sampled, top_k, top_p = policy.temperature > 0, each(policy.top_k), each(policy.top_p)

    def kth_greatest(cut):
        k = jnp.where(top_k > 0, jnp.minimum(top_k, x.shape[-1]), x.shape[-1])
        return _threshold(x, lambda kept: _total(kept.astype(jnp.int32)) >= k)

    def nucleus(cut):  # weight at and above it >= p of the whole, and > 0; NaN if rounding finds none
        weight = jnp.where(x < cut, 0, jnp.exp(scale(policy, x, top)))
        need = jnp.maximum(top_p * _total(weight), jnp.finfo(x.dtype).tiny)
        new = _threshold(x, lambda kept: _total(jnp.where(kept, weight, 0)) >= need)
        return jnp.where((top_p < 1) & (new > cut), new, cut)

    cut = jnp.full_like(top, -jnp.inf)
    cut = jax.lax.cond(any_of(sampled & (policy.top_k > 0)), kth_greatest, lambda cut: cut, cut)
    cut = jax.lax.cond(any_of(sampled & (policy.top_p < 1)), nucleus, lambda cut: cut, cut)
    return cut, jnp.log(_total(jnp.exp(kept(policy, x, top, cut, 0.0))))


def _threshold(x: Float[Array, "B N V"], enough: Callable[[Array], Array]) -> Float[Array, "B N 1"]:
    """The greatest t for which ``enough(x >= t)``, which must hold for the smallest x."""
    bits = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
    lowest, width = jnp.asarray(jnp.iinfo(bits).min, bits), jnp.iinfo(bits).bits

    def ordered(b):  # a float's bits <-> an integer in the order of the floats
        return jnp.where(b < 0, b ^ ~lowest, b)

    key = ordered(jax.lax.bitcast_convert_type(x, bits))

    def body(step, t):  # from the highest bit down
        higher = t ^ jax.lax.shift_right_logical(lowest, step.astype(bits))
        return jnp.where(enough(key >= higher), higher, t)

    t = jax.lax.fori_loop(0, width, body, jnp.full((*x.shape[:-1], 1), lowest))
    return jax.lax.bitcast_convert_type(ordered(t), x.dtype)
