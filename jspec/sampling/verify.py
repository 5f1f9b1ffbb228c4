"""Verification rules: which drafts are kept, and what follows the last of them.

A rule is two deterministic functions of one row (no batch axis): ``accept`` gives each
node its chance to be kept when the walk stands at its parent and earlier siblings were
refused, ``residual`` the law of the next token when the walk ends at a node. Together
they are a `Plan`: everything random about a verification with the randomness taken
out, so the output law of a rule can be summed exactly. `verify` is the loop's form: it
throws the coins, walks, and computes the residual of the one node where the walk ends.

Symbols: p is the target's law at a node, q the law that a node was drawn from (a point
mass where the drafter gives none), γ a row's own number of drafts.

| rule | lossless at | drafts that it can judge |
|---|---|---|
| `greedy`  | temperature 0 | any tree |
| `token`   | any temperature | chains |
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
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec import tree
from jspec.errors import JspecError
from jspec.sampling import keys
from jspec.types import Proposal, Verdict


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
    * ``prepare(row_key, position_N, law_NV) -> law_NV`` is applied to the law before
      both; ``position`` is that of the token which follows each node.
    * ``growths``: the kinds of draft that the rule can judge, "chain" and "tree".
    * ``random = False``: every chance is 0 or 1, every residual one token; no coins are
      thrown.
    * ``coupled``: drafters are to draw with the noise that the rule adds to the law
      (`keys.coupled_keys`), not with keys of their own.
    """

    name: str
    accept: Callable[[Proposal, Array], Array]
    residual: Callable[[Proposal, Array, Array], Array]
    prepare: Callable[[Array, Array, Array], Array] = _as_it_is
    growths: tuple[str, ...] = ("chain", "tree")
    random: bool = True
    coupled: bool = False


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


def _greedy_accept(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    following = keys.best(law)
    return (proposal.tokens == following[jnp.clip(proposal.tree.parent, 0)]).astype(law.dtype)


def _greedy_residual(proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    row = law[node]
    return jnp.where(jnp.arange(row.shape[0]) == keys.best(row), 0.0, -jnp.inf)


greedy = Verifier("greedy", _greedy_accept, _greedy_residual, random=False)
"""Temperature 0: a draft is kept iff it is the target's argmax (lowest id in a tie).

The law may be any log-weights, raw logits too."""


def _coupled_law(
    row_key: UInt32[Array, "2"], position: Int[Array, "N"], law: Float[Array, "N V"]
) -> Float[Array, "N V"]:
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


def _has_q(proposal: Proposal) -> Bool[Array, "N"]:
    """Whether a node's q is a law (no NaN, no +inf) by which its token can occur.

    Any other node is judged as a point mass, which keeps p whatever the drafter did.
    """
    if proposal.logq is None:
        return jnp.zeros(proposal.tokens.shape, bool)
    return jnp.isfinite(jnp.max(proposal.logq, axis=-1)) & (_own(proposal.logq, proposal) > -jnp.inf)


def _log_ratio(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    """log p/q of each node's own token."""
    p = law[jnp.clip(proposal.tree.parent, 0), proposal.tokens]
    if proposal.logq is None:
        return p
    return p - jnp.where(_has_q(proposal), _own(proposal.logq, proposal), 0.0)


def _excess(
    proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""], log_reach: Float[Array, ""]
) -> Float[Array, "V"]:
    """max(reach · p - q, 0), where q is the law that the node's child in a chain was drawn from."""
    child = jnp.minimum(node + 1, law.shape[0] - 1)
    q = jax.nn.one_hot(proposal.tokens[child], law.shape[1], dtype=law.dtype)
    if proposal.logq is not None:
        q = jnp.where(_has_q(proposal)[child], jnp.exp(proposal.logq[child]), q)
    return jnp.maximum(jnp.exp(law[node] + log_reach) - q, 0.0)


def _remainder(
    proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""], log_reach: Float[Array, ""]
) -> Float[Array, "V"]:
    """The excess as log-weights; p itself after the last draft, and where rounding left no excess."""
    excess = _excess(proposal, law, node, log_reach)
    refused = (node + 1 < proposal.count) & (jnp.max(excess) > 0)
    return jnp.where(refused, jnp.log(excess), law[node])


def _token_accept(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    return jnp.exp(jnp.minimum(_log_ratio(proposal, law), 0.0))


def _token_residual(proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    return _remainder(proposal, law, node, jnp.zeros((), law.dtype))


token = Verifier("token", _token_accept, _token_residual, growths=("chain",))
"""Token by token: accept x with probability min(1, p(x)/q(x)), else draw from max(p - q, 0).

(Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding,
arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""


def _log_reach(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    """log P_i: P_0 = 1, P_i = min(1, P_{i-1} · p(x_i)/q(x_i)); constant after the last draft."""
    node = jnp.arange(law.shape[0])
    ratio = jnp.where((node > 0) & (node < proposal.count), _log_ratio(proposal, law), 0.0)

    def reach(before, ratio):
        now = jnp.minimum(before + ratio, 0.0)
        return now, now

    return jax.lax.scan(reach, jnp.zeros((), law.dtype), ratio, unroll=True)[1]


def _block_chance(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    """h_i = S/(S + 1 - P_i) with S = Σ max(P_i p - q, 0), h_γ = P_γ, and 0 beyond it."""
    node = jnp.arange(law.shape[0])
    log_reach = _log_reach(proposal, law)
    total = jax.vmap(lambda i: _excess(proposal, law, i, log_reach[i]).sum())(node)
    below = total - jnp.expm1(log_reach)
    # Rounding must not lift h above 1, where 1 - h has no logarithm.
    chance = jnp.where(below > 0, jnp.minimum(total / jnp.where(below > 0, below, 1.0), 1.0), 1.0)
    chance = jnp.where(node == proposal.count - 1, jnp.exp(log_reach), chance)
    return jnp.where(node < proposal.count, chance, 0.0)


def _block_accept(proposal: Proposal, law: Float[Array, "N V"]) -> Float[Array, "N"]:
    if proposal.logq is None:  # then G_i = P_i: the rule is the token rule
        return _token_accept(proposal, law)
    # G_i = h_i + (1 - h_i) G_{i+1}, that is 1 - G_i = Π_{j ≥ i} (1 - h_j)
    misses = jnp.log1p(-_block_chance(proposal, law))
    kept = (-jnp.expm1(jax.lax.cumsum(misses, reverse=True))).at[0].set(1.0)
    before = kept[jnp.clip(proposal.tree.parent, 0)]
    return jnp.where(before > 0, kept / jnp.where(before > 0, before, 1.0), 0.0)


def _block_residual(proposal: Proposal, law: Float[Array, "N V"], node: Int[Array, ""]) -> Float[Array, "V"]:
    return _remainder(proposal, law, node, _log_reach(proposal, law)[node])


block = Verifier("block", _block_accept, _block_residual, growths=("chain",))
"""Block verification: the last of all drafts x_1..x_i whose coin u_i < h_i shows.

Never fewer tokens than `token` on average. The paper throws independent coins and takes
the last that passes; here the walk asks at each node for the chance that some coin from
here on passes, G_i, given that one from its parent on does: accept_i = G_i / G_{i-1}.
(Sun et al.: Block verification accelerates speculative decoding, arXiv 2403.10444)."""


def plan(verifier: Verifier, proposal: Proposal, law: Float[Array, "N V"]) -> Plan:
    """Write out a rule's decision for one row, every possible end of the walk included.

    >>> tokens, law = jnp.array([0, 2]), jnp.log(jnp.array([[.1, .2, .7], [.5, .3, .2]]))
    >>> chain = jax.tree.map(lambda x: x[0], tree.chain(1, 2))
    >>> plan(token, Proposal(tokens, chain, jnp.array(2)), law).accept[1]
    Array(0.7, dtype=float32)
    """
    nodes = jnp.arange(law.shape[0])
    residual = jax.vmap(lambda node: verifier.residual(proposal, law, node))(nodes)
    return Plan(verifier.accept(proposal, law), residual)


def _coins(row_key: UInt32[Array, "2"], position: Int[Array, ""], nodes: int) -> Float[Array, "N"]:
    use = jax.vmap(lambda node: keys.fold(row_key, position, keys.ACCEPT, node))(jnp.arange(nodes))
    return jax.vmap(jax.random.uniform)(use)


def _next(verifier: Verifier, key: Array, position: Array, last: Array, weights: Array) -> Int[Array, "B"]:
    if not verifier.random:
        return keys.best(weights)
    use = jax.vmap(keys.fold, (0, 0, None, 0))(key, position, keys.NEXT, last)
    return keys.draw_each(use, weights)


def verify(
    verifier: Verifier,
    key: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    proposal: Proposal,
    law: Float[Array, "B N V"],
    depth: int,
) -> Verdict:
    """Decide every row by its own key, for the round whose root stands at ``position``.

    ``law`` is log-probabilities in float32; ``depth`` is the tree's, static. A draft is
    kept iff u < accept, u in [0, 1), so that one of chance 0 never is.

    A node whose law is no law (its greatest weight is not finite: NaN, +inf, or all
    -inf) ends the walk and leaves ``ok`` False; what was accepted before it stands.

    Raises:
        JspecError: the proposal is a tree and the rule judges only chains.

    >>> law, root = jnp.log(jnp.array([[[0.5, 0.5, 0.0]]])), jnp.array([[0]])
    >>> alone = Proposal(root, tree.chain(1, 1), jnp.array([1]))
    >>> key = keys.row_keys([3], 1)
    >>> [int(verify(token, key, jnp.array([at]), alone, law, 0).next[0]) for at in range(5)]
    [0, 1, 0, 1, 1]
    """
    check_legal(verifier, "chain" if proposal.tree.mask is None else "tree")
    good = jnp.isfinite(jnp.max(law, axis=-1))
    law = jax.vmap(verifier.prepare)(key, position[:, None] + proposal.tree.depth + 1, law)
    parent_good = jnp.take_along_axis(good, jnp.clip(proposal.tree.parent, 0), axis=1)
    if proposal.tree.mask is None:  # a chain ends with its first bad law, also for rules that look ahead
        proposal = proposal._replace(count=jnp.minimum(proposal.count, 1 + jnp.cumprod(good, 1).sum(1)))
    real = jnp.arange(law.shape[1]) < proposal.count[:, None]
    chance = jax.vmap(verifier.accept)(proposal, law)
    coins = jax.vmap(_coins, (0, 0, None))(key, position, law.shape[1]) if verifier.random else 0.0
    path, accepted = tree.walk(proposal.tree, (coins < chance) & real & parent_good, depth)
    last = jnp.take_along_axis(path, accepted[:, None], axis=1)[:, 0]
    following = _next(verifier, key, position, last, jax.vmap(verifier.residual)(proposal, law, last))
    ok = jnp.take_along_axis(good, last[:, None], axis=1)[:, 0]
    return Verdict(path, accepted, following, ok)
