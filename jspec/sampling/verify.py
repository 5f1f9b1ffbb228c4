"""Verification rules: which drafts are kept, and what follows the last of them.

A rule is two deterministic functions of one row (no batch axis): ``accept`` gives each
node its chance to be kept when the walk stands at its parent and earlier siblings were
refused, ``residual`` the law of the next token when the walk ends at a node. Together
they are a `Plan`: everything random about a verification with the randomness taken
out, so the output law of a rule can be summed exactly. `verify` is the loop's form: it
computes the residual of the one node where the walk ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import tree
from jspec.types import Proposal, Verdict


class Plan(NamedTuple):
    """The rule's whole decision for one row."""

    accept: Float[Array, "N"]
    residual: Float[Array, "N V"]  # log-weights


@dataclass(frozen=True, eq=False)
class Verifier:
    """A rule. ``law`` is the target's row of log-weights at each node, path included.

    * ``accept(proposal, law_NV) -> Float[N]``; the root's entry is not used.
    * ``residual(proposal, law_NV, node) -> Float[V]``, log-weights.
    """

    name: str
    accept: Callable[[Proposal, Array], Array]
    residual: Callable[[Proposal, Array, Array], Array]


def _greedy_accept(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    best = jnp.argmax(law, axis=-1)
    return (proposal.tokens == best[jnp.clip(proposal.tree.parent, 0)]).astype(law.dtype)


def _greedy_residual(proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    row = law[node]
    return jnp.where(jnp.arange(row.shape[0]) == jnp.argmax(row), 0.0, -jnp.inf)


greedy = Verifier("greedy", _greedy_accept, _greedy_residual)
"""Temperature 0: a draft is kept iff it is the target's argmax (lowest id in a tie)."""


def plan(verifier: Verifier, proposal: Proposal, law: Float[Array, "N V"]) -> Plan:
    """Write out a rule's decision for one row, every possible end of the walk included.

    >>> tokens, law = jnp.array([0, 2]), jnp.log(jnp.array([[.1, .2, .7], [.5, .3, .2]]))
    >>> chain = jax.tree.map(lambda x: x[0], tree.chain(1, 2))
    >>> plan(greedy, Proposal(tokens, chain, jnp.array(2)), law).accept.tolist()[1]
    1.0
    """
    nodes = jnp.arange(law.shape[0])
    residual = jax.vmap(lambda node: verifier.residual(proposal, law, node))(nodes)
    return Plan(verifier.accept(proposal, law), residual)


def verify(verifier: Verifier, proposal: Proposal, law: Float[Array, "B N V"], depth: int) -> Verdict:
    """Decide every row. ``depth`` is the tree's, static.

    A node whose law is no law (its greatest weight is not finite: NaN, +inf, or all
    -inf) ends the walk and leaves ``ok`` False; what was accepted before it stands.
    """
    good = jnp.isfinite(jnp.max(law, axis=-1))
    index = jnp.arange(law.shape[1])
    parent_good = jnp.take_along_axis(good, jnp.clip(proposal.tree.parent, 0), axis=1)
    real = index < proposal.count[:, None]
    passed = jax.vmap(verifier.accept)(proposal, law) > 0
    path, accepted = tree.walk(proposal.tree, passed & real & parent_good, depth)
    last = jnp.take_along_axis(path, accepted[:, None], axis=1)[:, 0]
    weights = jax.vmap(verifier.residual)(proposal, law, last)
    ok = jnp.take_along_axis(good, last[:, None], axis=1)[:, 0]
    return Verdict(path, accepted, jnp.argmax(weights, axis=-1), ok)
