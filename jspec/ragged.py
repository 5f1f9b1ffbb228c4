"""Rows of different lengths in one buffer."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def append(
    buffer: Shaped[Array, "B S"], length: Int[Array, "B"], new: Shaped[Array, "B T"], count: Int[Array, "B"]
) -> Shaped[Array, "B S"]:
    """Write the first ``count`` of each row's new values after its own ``length``.

    Writes nothing else and never clamps: what does not fit is left out.

    >>> append(jnp.zeros((1, 5), int), jnp.array([2]), jnp.array([[7, 8, 9]]), jnp.array([2])).tolist()
    [[0, 0, 7, 8, 0]]
    """
    offset = jnp.arange(buffer.shape[1]) - length[:, None]
    values = jnp.take_along_axis(new, jnp.clip(offset, 0, new.shape[1] - 1), axis=1)
    fresh = (offset >= 0) & (offset < count[:, None])
    return jnp.where(fresh, values.astype(buffer.dtype), buffer)


def last(values: Shaped[Array, "B T *rest"], count: Int[Array, "B"]) -> Shaped[Array, "B *rest"]:
    """The last of each row's first ``count`` values; where there is none, the first slot's.

    >>> last(jnp.array([[7, 8, 9], [4, 5, 6]]), jnp.array([2, 0])).tolist()
    [8, 4]
    """
    index = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]
