"""A sampling setting that the library does not have: no id above a bound, which differs from row to row."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jspec.sampling import distribution, policy
from jspec.types import Policy


class Extended(Policy):
    """`Policy` with one more field; a subclass, for that is what annotations ask for."""

    highest_id: jax.Array  # the last id that may come, one a row; -1: off

    def _replace(self, **changed):
        return extended(super()._replace(**changed), self.highest_id)


def extended(parts: Iterable[jax.Array], highest_id: jax.Array) -> Extended:
    made = Extended(*parts)
    made.highest_id = highest_id
    return made


jax.tree_util.register_pytree_node(
    Extended, lambda x: ((*x, x.highest_id), None), lambda _, parts: extended(parts[:-1], parts[-1])
)


def _ban_ids_above(policy, history, nodes, tree, x):
    bound = policy.highest_id[:, None, None]
    return x + jnp.where((bound >= 0) & (jnp.arange(x.shape[-1]) > bound), -jnp.inf, 0)  # NaN stays


STEP = distribution.Step(("highest_id",), _ban_ids_above)


def install(patch, after: bool) -> None:
    """Add the step behind the temperature or before it."""
    patch.setitem(policy.NEUTRAL, "highest_id", -1.0)
    name = "AFTER_TEMPERATURE" if after else "BEFORE_TEMPERATURE"
    patch.setattr(distribution, name, (*getattr(distribution, name), STEP))
