"""The second pass of fused verification on Hopper GPUs: the draw that ends a round.

`jspec.pallas.verify.reference.gumbel_argmax_ref` says what is drawn. One kernel, grid (slices, B): a
program is one warpgroup with ``span`` ids in its registers, of the one row of logits that its sequence draws
from and of one row of ``logq`` where a drawn draft was refused. It makes the two random words of
each id (threefry: 220 integer operations an id, so even one sequence is spread over the
chip), turns them into noise, and gives the best id and its score twice: among what is left of p,
and of p itself, for where nothing is left. XLA joins the slices. **A row is read once**, so that
with the first pass each logit is read 1 + 1 / N times.

The words are those of `jax.random.bits` bit for bit, the noise that of `jspec.sampling.keys`;
logarithms may differ by a unit in the last place on a chip, so tokens are equal but for near
ties. Static: the shapes, the dtypes and ``span``; traced: everything else.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jspec.pallas import compat
from jspec.pallas.verify import reference, threefry
from jspec.pallas.verify.reference import LastDraw, Row, RowStats
from jspec.pallas.verify.rows_gpu import check, slices, widen, window
from jspec.types import Policy


def gumbel_argmax_gpu(
    policy: Policy,
    x: Float[Array, "B N V"],
    stats: RowStats,
    last: LastDraw,
    logq: Float[Array, "B N V"] | None = None,
    *,
    span: int = 1024,
    interpret: Any = False,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """`jspec.pallas.verify.reference.gumbel_argmax_ref` as a kernel.

    ``span``: ids a program, a multiple of 128.

    Raises:
        JspecError: logits or ``logq`` that are neither float32 nor bfloat16, or 2**24 ids or more.
    """
    check(x, "logits")
    vocab, row = x.shape[-1], reference.last_row(policy, stats, last)
    if logq is not None:
        check(logq, "logq")
        logq = widen(logq)
    score, ids = _sweep(row, widen(x), last, logq, vocab, span, interpret)
    winner = jnp.argmax(score, axis=-1)  # the first slice of the best: the lowest id
    left, any_left = (jnp.take_along_axis(part, winner[..., None], axis=-1)[..., 0] for part in (ids, score))
    token = jnp.where(any_left[:, 0] > -jnp.inf, left[:, 0], left[:, 1])
    own = x[jnp.arange(x.shape[0]), last.node, token].astype(jnp.float32)
    return token, reference.row_log_probs(own, token, row, row.best)


def _sweep(
    row: Row,
    x: Float[Array, "B N W"],
    last: LastDraw,
    logq: Float[Array, "B N W"] | None,
    vocab: int,
    span: int,
    interpret: Any,
) -> tuple[Float[Array, "B 2 slices"], Int[Array, "B 2 slices"]]:
    """The best score of each slice and its lowest id: of what is left, and of all."""
    batch, _, width = x.shape
    span = min(slices(x, span), span if logq is None else slices(logq, span))

    def body(x, key, refused, node, child, *refs):
        *fields, score, best = refs
        logq = fields.pop() if drawn else None
        part, sequence = lax.axis_index("slice"), lax.axis_index("row")
        of = Row(*(field[sequence] for field in fields))
        start, ids, _ = window(width, span, part)
        at = pl.ds(start, span)
        best_id = jnp.full(ids.shape, of.best)
        logp = reference.row_log_probs(x[sequence, node[sequence], at].astype(jnp.float32), ids, of, best_id)

        def without_refused() -> Array:
            def one(i: Array, weights: Array) -> Array:
                return jnp.where(ids == refused[sequence, i], -jnp.inf, weights)

            return lax.fori_loop(0, refused.shape[1], one, logp)

        def excess() -> Array:
            assert logq is not None
            q = jnp.exp(logq[sequence, child[sequence], at].astype(jnp.float32))
            return jnp.log(jnp.maximum(jnp.exp(logp + of.log_reach) - q, 0.0))

        weights = lax.cond(child[sequence] < 0, without_refused, excess) if drawn else without_refused()
        noise = threefry.gumbel(key[sequence, 0], key[sequence, 1], ids, vocab)
        for i, logp in enumerate((weights, logp)):
            total = logp + noise
            total = jnp.where(total == total, total, -jnp.inf)  # a bad row gives some id
            most = jnp.max(total)
            score[sequence, i, part] = most
            best[sequence, i, part] = jnp.min(jnp.where(total == most, ids, vocab - 1))

    drawn = logq is not None
    shape = batch, 2, -(-width // span)
    return compat.gpu_kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)),
        grid=(shape[2], batch),
        grid_names=("slice", "row"),
        interpret=interpret,
    )(x, last.key, last.refused, last.node, last.child, *row, *((logq,) if drawn else ()))
