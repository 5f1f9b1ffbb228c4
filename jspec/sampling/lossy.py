"""Rules that change the target's law. Their names say so, and `jspec certify` refuses them.

* `typical`: Medusa's typical acceptance;
* `simulated`: drafts are kept by chance, whatever they say, to time a loop as if a draft
  had some accept length. The text means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.errors import JspecError
from jspec.sampling.verify import Verifier, greedy
from jspec.types import Proposal

EPSILON, DELTA = 0.09, 0.3


def _typical_accept(proposal: Proposal, law: Float[Array, "M V"]) -> Float[Array, "N"]:
    above = jnp.clip(proposal.tree.parent, 0)
    p = jnp.exp(law)
    entropy = -jnp.sum(jnp.where(p > 0, p * law, 0.0), axis=-1)
    least = jnp.minimum(EPSILON, DELTA * jnp.exp(-entropy))
    return (p[above, proposal.tokens] > least[above]).astype(law.dtype)


typical = Verifier("typical_lossy", _typical_accept, greedy.residual, random=False, lossless=False)
"""Keep a draft x iff p(x) > min(0.09, 0.3 · exp(-entropy of p)); the next token is the likeliest.

At a node the first such child is taken, in the order of the draft's ranks; the paper takes
the longest of all such paths (Cai et al., arXiv 2401.10774, section 2.3.1)."""


def simulated(chances: Sequence[float]) -> Verifier:
    """Keep the draft at depth d with probability ``chances[d - 1]``, given that the one before was.

    Raises `JspecError` for no chance, or one outside 0 to 1.

    >>> simulated([0.9, 0.8]).name
    'simulated_lossy'
    """
    if not chances or not all(0.0 <= chance <= 1.0 for chance in chances):
        raise JspecError(
            f"simulated acceptance {list(chances)} should be chances from 0 to 1, one for each depth"
        )

    def accept(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
        return jnp.array([0.0, *chances], law.dtype)[: law.shape[0]]

    def residual(proposal: Proposal, law: Float[Array, "N V"], node: Array) -> Float[Array, "V"]:
        return law[node]

    return Verifier("simulated_lossy", accept, residual, growths=("chain",), lossless=False)
