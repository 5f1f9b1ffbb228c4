"""Verification rules: which drafts are kept, and what follows the last of them.

A rule is two deterministic functions of one row (no batch axis): ``accept`` gives each
node its chance to be kept when the walk stands at its parent and earlier siblings were
refused, ``residual`` the law of the next token when the walk ends at a node. Together
they are a `Plan`: everything random about a verification with the randomness taken
out, so the output law of a rule can be summed exactly. `jspec.sampling.walk` is the
loop's form: it throws the coins, walks, and computes the residual of the one node where
the walk ends.

A chain is given whole, so that a rule may look ahead. Of a tree a rule sees the star at
which the walk stands (`jspec.sampling.siblings`): a node and its children, as nodes of a
row with the law of that one node.

Symbols: p is the target's law at a node, q the law that a node was drawn from (a point
mass where the drafter gives none), γ a row's own number of drafts.

| rule | lossless at | drafts that it can judge |
|---|---|---|
| `greedy`  | temperature 0 | any tree |
| `token`   | any temperature | any tree |
| `block`   | any temperature | chains |
| `coupled` | any temperature | any tree |

The table is written in each rule's ``growths``; `check_legal` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.errors import JspecError
from jspec.sampling import keys, siblings
from jspec.types import Proposal


class Plan(NamedTuple):
    """The rule's whole decision for one row."""

    accept: Float[Array, "N"]
    residual: Float[Array, "N V"]  # log-weights


def _as_it_is(row_key: Array, position: Array, law: Array) -> Array:
    return law


@dataclass(frozen=True, eq=False)
class Verifier:
    """A rule. ``law`` is the target's row of log-probabilities at each node, path included.

    * ``accept(proposal, law_NV) -> Float[N]``; the root's entry is not used.
    * ``residual(proposal, law_NV, node) -> Float[V]``, log-weights of any total.
      Of a tree both get a star and the law of its node 0 alone, [1, V].
    * ``prepare(row_key, position_N, law_NV) -> law_NV`` is applied to the law before
      both; ``position`` is that of the token which follows each node.
    * ``growths``: the kinds of draft that the rule can judge, "chain" and "tree".
    * ``random = False``: every chance is 0 or 1, every residual one token; no coins are
      thrown.
    * ``coupled``: drafters are to draw with the noise that the rule adds to the law
      (`keys.coupled_keys`), not with keys of their own.
    * ``lossless = False``: the rule changes the target's law, and its name says so.
    """

    name: str
    accept: Callable[[Proposal, Array], Array]
    residual: Callable[[Proposal, Array, Array], Array]
    prepare: Callable[[Array, Array, Array], Array] = _as_it_is
    growths: tuple[str, ...] = ("chain", "tree")
    random: bool = True
    coupled: bool = False
    lossless: bool = True


def check_legal(verifier: Verifier, growth: str) -> None:
    """Refuse a rule that cannot judge drafts of this growth, "chain" or "tree".

    Raises:
        JspecError: the pair would not keep the target's law.

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


def _greedy_accept(proposal: Proposal, law: Float[Array, "M V"]) -> Float[Array, "N"]:
    following = keys.best(law)
    return (proposal.tokens == following[jnp.clip(proposal.tree.parent, 0)]).astype(law.dtype)


def _greedy_residual(proposal: Proposal, law: Float[Array, "M V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    row = law[node]
    return jnp.where(jnp.arange(row.shape[0]) == keys.best(row), 0.0, -jnp.inf)


greedy = Verifier("greedy", _greedy_accept, _greedy_residual, random=False)
"""Temperature 0: a draft is kept iff it is the target's argmax (lowest id in a tie).

The law may be any log-weights, raw logits too."""


def _coupled_law(
    row_key: UInt32[Array, "2"], position: Int[Array, "M"], law: Float[Array, "M V"]
) -> Float[Array, "M V"]:
    key = keys.coupled_keys(row_key)
    return law + jax.vmap(lambda at: keys.coupled_noise(key, at, law.shape[1], law.dtype))(position)


coupled = Verifier("coupled", _greedy_accept, _greedy_residual, _coupled_law, random=False, coupled=True)
"""The next token is ``argmax(log p + g)``, g being the Gumbel noise of row and position.

That draws from p, and a draft is kept iff it is this very token. So the text depends on
the row's key alone, not on the drafter or on how far it drafts; with no draft at all it
is the same text. ``logq`` is not used. A draft ``argmax(log q + g)`` with the same noise
is kept with probability Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i).
(Daliri, Musco, Suresh: Coupling without communication and drafter-invariant speculative
decoding, arXiv 2408.07978)."""


def _own(rows: Float[Array, "N V"], proposal: Proposal) -> Float[Array, "N"]:
    """The entry of each node's own token in its own row."""
    return jnp.take_along_axis(rows, proposal.tokens[:, None], axis=1)[:, 0]


def _log_ratio(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    """log p/q of each node's own token."""
    p = law[jnp.clip(proposal.tree.parent, 0), proposal.tokens]
    if proposal.logq is None:
        return p
    return p - jnp.where(siblings.has_law(proposal), _own(proposal.logq, proposal), 0.0)


def _excess(
    proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""], log_reach: Float[Array, ""]
) -> Float[Array, "V"]:
    """max(reach · p - q, 0), where q is the law that the node's child in a chain was drawn from."""
    child = jnp.minimum(node + 1, law.shape[0] - 1)
    q = jax.nn.one_hot(proposal.tokens[child], law.shape[1], dtype=law.dtype)
    if proposal.logq is not None:
        q = jnp.where(siblings.has_law(proposal)[child], jnp.exp(proposal.logq[child]), q)
    return jnp.maximum(jnp.exp(law[node] + log_reach) - q, 0.0)


def _remainder(
    proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""], log_reach: Float[Array, ""]
) -> Float[Array, "V"]:
    """The excess as log-weights; p itself after the last draft, and where rounding left no excess."""
    excess = _excess(proposal, law, node, log_reach)
    refused = (node + 1 < proposal.count) & (jnp.max(excess) > 0)
    return jnp.where(refused, jnp.log(excess), law[node])


def _token_accept(proposal: Proposal, law: Float[Array, "M V"]) -> Float[Array, "N"]:
    if proposal.tree.mask is not None:
        return siblings.chances(proposal, law[0])
    return jnp.exp(jnp.minimum(_log_ratio(proposal, law), 0.0))


def _token_residual(proposal: Proposal, law: Float[Array, "M V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    if proposal.tree.mask is not None:
        return siblings.remainder(proposal, law[0])
    return _remainder(proposal, law, node, jnp.zeros((), law.dtype))


token = Verifier("token", _token_accept, _token_residual)
"""Token by token: accept x with probability min(1, p(x)/q(x)), else draw from max(p - q, 0).

(Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding,
arXiv 2211.17192; Chen et al., arXiv 2302.01318). Siblings in a tree are asked one after
the other, each with what the earlier ones left of p: `jspec.sampling.siblings`."""


def log_reach(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    """log P_i: P_0 = 1, P_i = min(1, P_{i-1} · p(x_i)/q(x_i)); constant after the last draft."""
    return reach_of(_log_ratio(proposal, law), proposal.count)


def reach_of(ratio: Float[Array, "N"], count: Int[Array, ""]) -> Float[Array, "N"]:
    """`log_reach` from log p/q of each node's own token."""
    node = jnp.arange(ratio.shape[0])
    ratio = jnp.where((node > 0) & (node < count), ratio, 0.0)

    def reach(before, ratio):
        now = jnp.minimum(before + ratio, 0.0)
        return now, now

    return jax.lax.scan(reach, jnp.zeros((), ratio.dtype), ratio, unroll=True)[1]


def _block_chance(
    total: Float[Array, "N"], reach: Float[Array, "N"], count: Int[Array, ""]
) -> Float[Array, "N"]:
    """h_i = S/(S + 1 - P_i) with S = Σ max(P_i p - q, 0), h_γ = P_γ, and 0 beyond it."""
    node = jnp.arange(total.shape[0])
    below = total - jnp.expm1(reach)
    # Rounding must not lift h above 1, where 1 - h has no logarithm.
    chance = jnp.where(below > 0, jnp.minimum(total / jnp.where(below > 0, below, 1.0), 1.0), 1.0)
    chance = jnp.where(node == count - 1, jnp.exp(reach), chance)
    return jnp.where(node < count, chance, 0.0)


def _block_accept(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    if proposal.logq is None:  # then G_i = P_i: the rule is the token rule
        return _token_accept(proposal, law)
    reach = log_reach(proposal, law)
    total = jax.vmap(lambda i: _excess(proposal, law, i, reach[i]).sum())(jnp.arange(law.shape[0]))
    return block_chances(proposal, total, reach)


def block_chances(
    proposal: Proposal, total: Float[Array, "N"], reach: Float[Array, "N"]
) -> Float[Array, "N"]:
    """The block rule's chances from each node's P (``reach``, a logarithm) and Σ max(P p - q, 0)."""
    # G_i = h_i + (1 - h_i) G_{i+1}, that is 1 - G_i = Π_{j ≥ i} (1 - h_j)
    misses = jnp.log1p(-_block_chance(total, reach, proposal.count))
    kept = (-jnp.expm1(jax.lax.cumsum(misses, reverse=True))).at[0].set(1.0)
    before = kept[jnp.clip(proposal.tree.parent, 0)]
    return jnp.where(before > 0, kept / jnp.where(before > 0, before, 1.0), 0.0)


def _block_residual(proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    return _remainder(proposal, law, node, log_reach(proposal, law)[node])


block = Verifier("block", _block_accept, _block_residual, growths=("chain",))
"""Block verification: the last of all drafts x_1..x_i whose coin u_i < h_i shows.

Never fewer tokens than `token` on average. The paper throws independent coins and takes
the last that passes; here the walk asks at each node for the chance that some coin from
here on passes, G_i, given that one from its parent on does: accept_i = G_i / G_{i-1}.
(Sun et al.: Block verification accelerates speculative decoding, arXiv 2403.10444)."""


def plan(verifier: Verifier, proposal: Proposal, law: Float[Array, "N V"]) -> Plan:
    """Write out a rule's decision for one row, every possible end of the walk included.

    >>> from jspec import tree
    >>> tokens, law = jnp.array([0, 2]), jnp.log(jnp.array([[.1, .2, .7], [.5, .3, .2]]))
    >>> chain = jax.tree.map(lambda x: x[0], tree.chain(1, 2))
    >>> plan(token, Proposal(tokens, chain, jnp.array(2)), law).accept[1]
    Array(0.7, dtype=float32)
    """
    nodes = jnp.arange(law.shape[0])
    if proposal.tree.mask is None:
        residual = jax.vmap(lambda node: verifier.residual(proposal, law, node))(nodes)
        return Plan(verifier.accept(proposal, law), residual)

    def at(node: Array) -> tuple[Array, Array]:
        star = siblings.star(proposal, node)
        own = law[node][None]
        chance = jnp.where(siblings.children(star), verifier.accept(star, own), 0.0)
        return chance, verifier.residual(star, own, jnp.zeros((), jnp.int32))

    chances, residual = jax.vmap(at)(nodes)
    return Plan(chances.sum(axis=0), residual)  # a node is the child of one other
