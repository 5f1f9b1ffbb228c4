"""The two passes of fused verification over the vocabulary, and their plain references.

1. ``row_stats(policy, x) -> RowStats``: every row of logits once, to the few numbers that
   are its distribution (`jspec.sampling.truncate`).
2. ``gumbel_argmax(policy, x, stats, last, logq) -> (token, log p)``: one row a sequence a second
   time, to draw the token that ends the round.

Between them nothing is wider than the draft (`jspec.pallas.verify.fused`). `row_stats_ref` and
`gumbel_argmax_ref` are what each kernel is compared with: the numbers up to rounding, the noise
bit for bit. Logits are float32 or bfloat16, -inf allowed; distributions and noise are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.sampling import keys, truncate
from jspec.types import Policy

__all__ = [
    "LastDraw",
    "Row",
    "RowStats",
    "gumbel_argmax_ref",
    "last_row",
    "log_probs",
    "remaining",
    "row_log_probs",
    "row_stats_ref",
]


class RowStats(NamedTuple):
    """The distribution of each row, given its logits and its sequence's settings."""

    top: Float[Array, "B N"]  # the greatest logit; NaN: the row is no distribution (NaN, +inf or only -inf)
    cut: Float[Array, "B N"]  # the least logit that top-k and top-p keep; -inf: all
    log_total: Float[Array, "B N"]  # of what is kept, relative to top, temperature applied
    best: Int[Array, "B N"]  # the first id of the greatest logit; 0 in a bad row


class LastDraw(NamedTuple):
    """What a sequence draws from in the end: a row, and what its refused drafts leave of it."""

    node: Int[Array, "B"]  # the row
    key: UInt32[Array, "B 2"]  # of this draw: threefry data, `jspec.sampling.keys.fold`
    refused: Int[Array, "B M"]  # ids refused as point masses; -1: none
    child: Int[Array, "B"]  # the row of logq whose draft was refused; -1: none
    log_reach: Float[Array, "B"]  # the weights are max(reach * p - q, 0); of the token verifier 0


class Row(NamedTuple):
    """The row that a sequence draws from in the end, as the second pass has it."""

    best: Int[Array, "B"]  # where all mass is; -1: at a temperature above 0
    scale: Float[Array, "B"]
    low: Float[Array, "B"]  # least logit after the temperature, relative to top
    top: Float[Array, "B"]
    cut: Float[Array, "B"]
    log_total: Float[Array, "B"]
    log_reach: Float[Array, "B"]


def last_row(policy: Policy, stats: RowStats, last: LastDraw) -> Row:
    """What the second pass needs of the row statistics."""
    sequence, sampled = jnp.arange(last.node.shape[0]), policy.temperature > 0
    top, cut, log_total, best = (part[sequence, last.node] for part in stats)
    return Row(
        best=jnp.where(sampled, -1, best),
        scale=jnp.where(sampled, jnp.minimum(policy.temperature, 1e30), 1.0),
        low=jnp.log(policy.min_p),
        top=top,
        cut=cut,
        log_total=log_total,
        log_reach=last.log_reach,
    )


def row_stats_ref(policy: Policy, x: Float[Array, "B N V"]) -> RowStats:
    """Greatest logit, cut, total and first best of each row, in plain jnp.

    >>> from jspec.sampling import policy
    >>> row_stats_ref(policy.make(1, 3, top_k=2), jnp.log(jnp.array([[[.4, .1, .5]]]))).best.tolist()
    [[2]]
    """
    x = x.astype(jnp.float32)
    top = truncate.greatest(x)
    cut, log_total = truncate.truncate(policy, x, top)
    index = jnp.arange(x.shape[-1])
    best = jnp.min(jnp.where(x == top, index, x.shape[-1]), axis=-1)
    return RowStats(top[..., 0], cut[..., 0], log_total[..., 0], jnp.where(best < x.shape[-1], best, 0))


def log_probs(
    policy: Policy, stats: RowStats, x: Float[Array, "B N V"], ids: Int[Array, "B N V"] | None = None
) -> Float[Array, "B N V"]:
    """The log-probabilities of whole rows: `jspec.sampling.distribution.log_probs` without its steps 1 to 4.

    ``ids``: of the tokens whose logits are in ``x``, where those are not whole rows.
    """
    ids = jnp.arange(x.shape[-1]) if ids is None else ids
    top, cut, log_total, best = (part[..., None] for part in stats)
    sampled = truncate.kept(policy, x.astype(jnp.float32), top, cut, log_total)
    greedy = jnp.where(ids == best, 0.0, -jnp.inf) + 0 * top  # NaN stays
    return jnp.where(truncate.each(policy.temperature > 0), sampled, greedy)


def row_log_probs(
    x: Float[Array, "*v"], ids: Int[Array, "*v"], row: Row, best: Int[Array, "..."]
) -> Float[Array, "*v"]:
    """The same of some ids of one row, inside a kernel; ``best`` is the row's, as wide as a chip wants it."""
    scaled = (x - row.top) / row.scale
    sampled = jnp.where((x < row.cut) | (scaled < row.low), -jnp.inf, scaled) - row.log_total
    greedy = jnp.where(ids == best, 0.0, -jnp.inf) + 0 * row.top  # NaN stays
    return jnp.where(best < 0, sampled, greedy)


def gumbel_argmax_ref(
    policy: Policy,
    x: Float[Array, "B N V"],
    stats: RowStats,
    last: LastDraw,
    logq: Float[Array, "B N V"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draw each sequence's last token: the weight that is left of p, or p where nothing is.

    Gives the token and its log p. In a bad row the token means nothing but is an id.

    >>> from jspec.sampling import policy
    >>> rows, x = policy.make(1, 3), jnp.log(jnp.array([[[.4, .1, .5]]]))
    >>> node, refused, child, log_reach = jnp.array([0]), jnp.array([[0, 2]]), jnp.array([-1]), jnp.zeros(1)
    >>> last = LastDraw(node, keys.row_keys([7], 1), refused, child, log_reach)
    >>> gumbel_argmax_ref(rows, x, row_stats_ref(rows, x), last)[0].tolist()
    [1]
    """
    logp, weights = remaining(policy, x, stats, last, logq)
    some = jnp.max(weights, axis=1, keepdims=True) > -jnp.inf
    noise = jax.vmap(lambda key: keys.gumbel(key, x.shape[2]))(keys.wrap(last.key))
    token = keys.best(jnp.where(some, weights, logp) + noise)
    return token, logp[jnp.arange(x.shape[0]), token]


def remaining(
    policy: Policy,
    x: Float[Array, "B N V"],
    stats: RowStats,
    last: LastDraw,
    logq: Float[Array, "B N V"] | None = None,
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """log p at the row of each last draw, and the log-weights that its refused drafts leave of it."""
    row = jnp.arange(x.shape[0])
    own = jax.tree.map(lambda part: part[row, last.node][:, None], (stats, x))
    logp = log_probs(policy, *own)[:, 0]
    refused = jnp.where(last.refused < 0, logp.shape[1], last.refused)
    weights = logp.at[row[:, None], refused].set(-jnp.inf, mode="drop")
    if logq is not None:
        q = jnp.exp(logq[row, jnp.clip(last.child, 0)])
        excess = jnp.maximum(jnp.exp(logp + last.log_reach[:, None]) - q, 0.0)
        weights = jnp.where((last.child < 0)[:, None], weights, jnp.log(excess))
    return logp, weights
