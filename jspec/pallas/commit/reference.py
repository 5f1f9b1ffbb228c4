"""The commit of an accepted path: what its TPU and its GPU form share, and their reference.

Kept entry i of a row moves from slot ``length + path[i]`` to slot ``length + i``, in every
layer. A node comes after its parent, so ``path[i] >= i``: entries with ``path[i] == i`` are
where they belong, and what is beyond the accepted nodes has path 0. Only entries with
``path[i] > i`` are copied; all of a row is read before any of it is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jspec.cache.dense import Entry
from jspec.cache.dense import compact as compact_ref
from jspec.errors import JspecError

__all__ = ["check", "compact_ref"]


def check(layers: Sequence[Entry], dtypes: Sequence[str]) -> None:
    """Raise JspecError unless all layers have the same heads, head_dim and dtype, one of ``dtypes``.

    >>> import jax.numpy as jnp
    >>> check([Entry(jnp.zeros((1, 1, 8, 4), jnp.int8), jnp.zeros((1, 1, 8, 4), jnp.int8))], ["float32"])
    Traceback (most recent call last):
    jspec.errors.JspecError: the commit kernel takes caches of float32, not int8
    """
    first = layers[0].keys
    for buffer in jax.tree.leaves(tuple(layers)):
        here, there = (x.shape[:2] + x.shape[3:] for x in (buffer, first))
        if here != there or buffer.dtype != first.dtype:
            raise JspecError(
                "the commit kernel takes layers that differ in their slots alone, not "
                f"{buffer.dtype}{list(buffer.shape)} beside {first.dtype}{list(first.shape)}"
            )
    if str(first.dtype) not in dtypes:
        raise JspecError(f"the commit kernel takes caches of {' or '.join(dtypes)}, not {first.dtype}")
