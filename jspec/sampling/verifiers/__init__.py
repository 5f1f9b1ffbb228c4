"""Verifiers: which drafts are kept, and what follows the last of them. One file each.

A verifier (`jspec.types.Verifier`) is two deterministic functions of one row: ``accept`` gives
each node its chance to be kept when the walk stands at its parent and earlier siblings were
refused, ``residual`` the distribution of the next token when the walk ends at a node.
`jspec.sampling.walk` is the loop's form: it throws uniform numbers, walks, and computes the
residual of the one node where the walk ends. `outcomes` writes the whole decision out, so that
the output distribution of a verifier can be summed exactly.

A chain is given whole, so that a verifier may look ahead. Of a tree it sees the node at which
the walk stands, with its children (`jspec.sampling.siblings`).

Symbols: p is the target's distribution at a node, q the one that a node was drawn from (a point
mass where the drafter gives none), γ a row's own number of drafts.

| verifier | lossless at | drafts that it can judge |
|---|---|---|
| `greedy`  | temperature 0 | any tree |
| `token`   | any temperature | any tree |
| `block`   | any temperature | chains |
| `coupled` | any temperature | any tree |
| `typical_lossy` | never | any tree |

A verifier of one's own is a file here and a line in `VERIFIERS`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.errors import JspecError
from jspec.sampling import siblings
from jspec.sampling.verifiers.block import block
from jspec.sampling.verifiers.coupled import coupled
from jspec.sampling.verifiers.greedy import greedy
from jspec.sampling.verifiers.lossy import simulated_lossy, typical_lossy
from jspec.sampling.verifiers.token import token
from jspec.types import Proposal, Verifier

__all__ = [
    "VERIFIERS",
    "Outcomes",
    "block",
    "check_legal",
    "coupled",
    "find_verifier",
    "greedy",
    "outcomes",
    "simulated_lossy",
    "token",
    "typical_lossy",
]

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier for verifier in (token, block, coupled, greedy, typical_lossy)
}
"""``verifier=`` -> the verifier."""


def find_verifier(name: str) -> Verifier:
    """The verifier of a name in `VERIFIERS`.

    Args:
        name: for instance "token".

    Raises:
        JspecError: there is none of this name; those that there are are listed.

    >>> find_verifier("block").growths
    ('chain',)
    """
    if name not in VERIFIERS:
        raise JspecError(f"unknown verifier {name!r}: choose one of {', '.join(VERIFIERS)}")
    return VERIFIERS[name]


def check_legal(verifier: Verifier, growth: str) -> None:
    """Refuse a verifier that cannot judge drafts of a growth.

    Args:
        verifier: of a decoder.
        growth: of its drafter, "chain" or "tree".

    Raises:
        JspecError: the pair would not keep the target distribution.

    >>> check_legal(block, "tree")
    Traceback (most recent call last):
    jspec.errors.JspecError: the verifier 'block' judges drafts that grow as chain, not as tree...
    """
    if growth not in verifier.growths:
        able = " or ".join(verifier.growths)
        raise JspecError(
            f"the verifier {verifier.name!r} judges drafts that grow as {able}, not as {growth}: "
            "take another verifier or another drafter"
        )


class Outcomes(NamedTuple):
    """A verifier's whole decision for one row, with the randomness taken out."""

    accept: Float[Array, "N"]
    residual: Float[Array, "N V"]  # log-weights


def outcomes(verifier: Verifier, proposal: Proposal, logp: Float[Array, "N V"]) -> Outcomes:
    """Write out a verifier's decision for one row, every possible end of the walk included.

    Args:
        verifier: any.
        proposal: of one row: arrays without a batch axis, tokens Int[N].
        logp: Float[N, V], the target's log-probabilities after each node.

    >>> from jspec import tree
    >>> tokens, logp = jnp.array([0, 2]), jnp.log(jnp.array([[.1, .2, .7], [.5, .3, .2]]))
    >>> chain = jax.tree.map(lambda x: x[0], tree.chain(1, 2))
    >>> outcomes(token, Proposal(tokens, chain, jnp.array(2)), logp).accept[1]
    Array(0.7, dtype=float32)
    """
    proposal = siblings.without_foreign_ids(proposal, logp.shape[-1])
    nodes = jnp.arange(logp.shape[0])
    if proposal.tree.mask is None:
        residual = jax.vmap(lambda node: verifier.residual(proposal, logp, node))(nodes)
        return Outcomes(jnp.where(nodes < proposal.count, verifier.accept(proposal, logp), 0.0), residual)

    def at(node: Array) -> tuple[Array, Array]:
        here = siblings.node_with_children(proposal, node)
        own = logp[node][None]
        chance = jnp.where(siblings.children(here), verifier.accept(here, own), 0.0)
        return chance, verifier.residual(here, own, jnp.zeros((), jnp.int32))

    chances, residual = jax.vmap(at)(nodes)
    return Outcomes(chances.sum(axis=0), residual)  # a node is the child of one other
