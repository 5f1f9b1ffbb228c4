"""Verifiers that change the target's distribution. Their names say so, and `jspec certify` refuses them.

* `typical_lossy`: Medusa's typical acceptance;
* `simulated_lossy`: drafts are kept by chance, whatever they say, to time a loop as if a draft
  had some accept length. The text means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.errors import JspecError
from jspec.once import built_once
from jspec.sampling.verifiers.greedy import argmax_alone
from jspec.types import Proposal, Verifier

EPSILON, DELTA = 0.09, 0.3


def _typical_accept(proposal: Proposal, logp: Float[Array, "M V"]) -> Float[Array, "N"]:
    above = jnp.clip(proposal.tree.parent, 0)
    p = jnp.exp(logp)
    entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0.0), axis=-1)
    least = jnp.minimum(EPSILON, DELTA * jnp.exp(-entropy))
    return (p[above, proposal.tokens] > least[above]).astype(logp.dtype)


typical_lossy = Verifier("typical_lossy", _typical_accept, argmax_alone, random=False, lossless=False)
"""Keep a draft x iff p(x) > min(0.09, 0.3 · exp(-entropy of p)); the next token is the likeliest.

At a node the first such child is taken, in the order of the draft's ranks; the paper takes
the longest of all such paths (Cai et al., arXiv 2401.10774, section 2.3.1)."""


@built_once
def simulated_lossy(chances: Sequence[float]) -> Verifier:
    """A verifier that keeps the draft at depth d by chance, given that the one before was kept.

    Args:
        chances: from 0 to 1, for depth 1, 2, ...

    Raises:
        JspecError: no chance, or one outside 0 to 1.

    >>> simulated_lossy([0.9, 0.8]).name
    'simulated_lossy'
    """
    if not chances or not all(0.0 <= chance <= 1.0 for chance in chances):
        raise JspecError(
            f"simulated acceptance {list(chances)} should be chances from 0 to 1, one for each depth"
        )

    def accept(proposal: Proposal, logp: Float[Array, "N V"]) -> Float[Array, "N"]:
        return jnp.array([0.0, *chances], logp.dtype)[: logp.shape[0]]

    def residual(proposal: Proposal, logp: Float[Array, "N V"], node: Array) -> Float[Array, "V"]:
        return logp[node]

    return Verifier("simulated_lossy", accept, residual, growths=("chain",), lossless=False)
