"""The second pass of fused verification on TPU: one row a sequence from HBM, the noise made on the way.

`jspec.pallas.verify.reference.gumbel_argmax_ref` says what is drawn.

Grid (B,), parallel. The row where the walk ended, and the draft's row that was refused there,
are copied by hand into VMEM, each in 8 pieces of W = ⌈V/8⌉ ids (a multiple of 128) that lie
on the 8 sublanes, so that vectors are full at any batch size. Then one sweep in pieces of
[8, `LANES`] makes two threefry words for each id, the noise, and the best of what is left of p
and of p itself; which of the two counts is known at its last.

HBM: B · V logits, and as much of the draft's distribution where a draft with a distribution was refused. A
bfloat16 row comes with the one that shares its 32-bit words, rows 2i and 2i + 1, and is taken
out in the sweep; the last of an odd number comes alone. If V is no multiple of 128, a row comes
with the 8 of its tile. VMEM: two rows of float32, or pairs of bfloat16, and such tiles. Limit:
about 270 integer and float operations an id, by which 128 k ids would take 35 µs at 1 GHz.

Static: all shapes, whether there is a draft distribution. Traced: everything else.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jspec.errors import JspecError
from jspec.pallas import compat
from jspec.pallas.verify import reference, threefry
from jspec.pallas.verify.reference import LastDraw, RowStats
from jspec.types import Policy

LANES = 512
"""Ids on each sublane in one piece of the sweep."""

VMEM = 100 * 2**20
"""Bytes that the kernel may take; a v5e has 128 MiB."""


def gumbel_argmax_tpu(
    policy: Policy,
    x: Float[Array, "B N V"],
    stats: RowStats,
    last: LastDraw,
    logq: Float[Array, "B N V"] | None = None,
    *,
    interpret: Any = False,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """`jspec.pallas.verify.reference.gumbel_argmax_ref` as a kernel.

    Raises:
        JspecError: logits, or a draft's distribution, that are neither float32 nor bfloat16.
    """
    batch, nodes, vocab = x.shape
    given = [rows.reshape(batch * nodes, vocab) for rows in (x, logq) if rows is not None]
    for rows in given:
        if rows.dtype not in (jnp.float32, jnp.bfloat16):
            raise JspecError(f"rows are {rows.dtype}; the kernel takes float32 and bfloat16")
    row = reference.last_row(policy, stats, last)
    first = nodes * jnp.arange(batch)
    child = jnp.where(last.child < 0, -1, first + last.child)
    places, numbers = jnp.stack([first + last.node, child, row.best]), jnp.stack(row[1:])
    width = pl.cdiv(pl.cdiv(vocab, 8), 128) * 128
    token, logp = pl.pallas_call(
        functools.partial(_body, vocab=vocab, width=width, drawn=logq is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch,),
            in_specs=[_block(rows, place) for place, rows in enumerate(given)],
            out_specs=[pl.BlockSpec((1, 1, 1), lambda b, *_: (b, 0, 0))] * 2,
            scratch_shapes=[*(_room(rows, width) for rows in given), pltpu.SemaphoreType.DMA],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, 1, 1), dtype) for dtype in (jnp.int32, jnp.float32)],
        compiler_params=compat.tpu_params("parallel", vmem_limit_bytes=VMEM),
        interpret=interpret,
        name="gumbel_argmax",
    )(
        places.astype(jnp.int32),
        numbers.astype(jnp.float32),
        last.key,
        last.refused.astype(jnp.int32),
        *given,
    )
    return token[:, 0, 0], logp[:, 0, 0]


def _by_hand(vocab: int) -> bool:
    """Whether the kernel copies rows itself; else it gets whole tiles."""
    return vocab % 128 == 0


def _block(rows: Array, place: int) -> pl.BlockSpec:
    """Where the kernel finds one row."""
    count, vocab = rows.shape
    if _by_hand(vocab):
        return pl.BlockSpec(memory_space=pl.ANY)
    tile = min(count, 8)

    def index(b, places, *_):
        return jnp.maximum(places[place, b], 0) // tile, 0

    return pl.BlockSpec((tile, vocab), index)


def _room(rows: Array, width: int) -> Any:
    """Where it puts the row: on 8 sublanes, of float32 or of words that two rows share."""
    pairs = rows.dtype == jnp.bfloat16 and _by_hand(rows.shape[1])
    return pltpu.VMEM((16, width), jnp.bfloat16) if pairs else pltpu.VMEM((8, width), jnp.float32)


def _load(rows_ref, node, row_ref, semaphore, vocab: int) -> None:
    """Put one row, or the two that share its words, into VMEM, one eighth on each sublane."""
    width, share, count = row_ref.shape[1], row_ref.shape[0] // 8, rows_ref.shape[0]
    pieces = [(s, s * width, min(width, vocab - s * width)) for s in range(8) if s * width < vocab]
    if not _by_hand(vocab):
        _pick(rows_ref, node, row_ref, pieces)
        return
    paired = count // share * share

    def together():
        first = pl.multiple_of(node // share * share, share)
        targets = [row_ref.at[pl.ds(s * share, share)] for s, *_ in pieces]
        _copy(rows_ref.at[pl.ds(first, share)], targets, semaphore, pieces)

    def last(room_ref):
        # A single row fits no place of two; it fills a room of its own, from where both halves take it.
        targets = [room_ref.at[s] for s, *_ in pieces]
        _copy(rows_ref.at[pl.ds(count - 1, 1)], targets, semaphore, pieces)
        for s, _, ids in pieces:
            row = room_ref[s, :, pl.ds(0, ids)]
            row_ref[pl.ds(s * share, share), pl.ds(0, ids)] = jnp.broadcast_to(row, (share, ids))

    if paired:
        pl.when(node < paired)(together)
    if paired < count:
        room = pltpu.VMEM((8, 1, width), row_ref.dtype)
        pl.when(node >= paired)(lambda: pl.run_scoped(last, room))


def _copy(rows_ref, targets, semaphore, pieces) -> None:
    """Out of HBM, each piece to its target."""
    copies = [
        pltpu.make_async_copy(rows_ref.at[:, pl.ds(first, ids)], target.at[:, pl.ds(0, ids)], semaphore)
        for target, (_, first, ids) in zip(targets, pieces, strict=True)
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _pick(rows_ref, node, row_ref, pieces) -> None:
    """Out of a block of whole tiles."""
    tile = rows_ref.shape[0]
    for s, first, ids in pieces:
        for start in range(0, ids, 8 * LANES):
            size = min(8 * LANES, ids - start)
            block = rows_ref[:, pl.ds(first + start, size)].astype(jnp.float32)
            mine = jax.lax.broadcasted_iota(jnp.int32, block.shape, 0) == node % tile
            # A maximum takes the row as it is; a sum would make NaN of -inf * 0.
            own = jnp.max(jnp.where(mine, block, -jnp.inf), axis=0, keepdims=True)
            row_ref[pl.ds(s, 1), pl.ds(start, size)] = own


def _read(row_ref, node, columns):
    """A piece of the row, [8, ids] in float32."""
    piece = row_ref[:, columns]
    if row_ref.dtype == jnp.float32:
        return piece
    # Of the two rows in a word the even one is the low half; a bfloat16 is the high half of a float32.
    words = pltpu.bitcast(piece, jnp.uint32)
    own = jnp.where(node % 2 == 0, words << 16, words & jnp.uint32(0xFFFF0000))
    return jax.lax.bitcast_convert_type(own, jnp.float32)


def _body(places_ref, numbers_ref, key_ref, refused_ref, *refs, vocab, width, drawn):
    count = 1 + drawn
    rows_refs, (token_ref, logp_ref), scratch = refs[:count], refs[count : count + 2], refs[count + 2 :]
    *row_refs, semaphore = scratch
    b = pl.program_id(0)
    node, child, best = (places_ref[i, b] for i in range(3))
    row = reference.Row(best, *(numbers_ref[i, b] for i in range(6)))
    _load(rows_refs[0], node, row_refs[0], semaphore, vocab)
    if drawn:
        pl.when(child >= 0)(lambda: _load(rows_refs[1], child, row_refs[1], semaphore, vocab))
    key = key_ref[b, 0], key_ref[b, 1]

    def visit(first, ids, carry):
        columns = pl.ds(first, ids)
        piece = _read(row_refs[0], node, columns)
        lane, sublane = (jax.lax.broadcasted_iota(jnp.int32, piece.shape, axis) for axis in (1, 0))
        token = sublane * width + first + lane
        logp = reference.row_log_probs(piece, token, row, best)
        weights = logp
        for m in range(refused_ref.shape[1]):
            weights = jnp.where(token == refused_ref[b, m], -jnp.inf, weights)
        if drawn:
            excess = jnp.maximum(
                jnp.exp(logp + row.log_reach) - jnp.exp(_read(row_refs[1], child, columns)), 0.0
            )
            weights = jnp.where(child >= 0, jnp.log(excess), weights)
        noise = threefry.gumbel(*key, token, vocab)
        return tuple(
            _better(best_so_far, jnp.where(token < vocab, score + noise, -jnp.inf), token, logp)
            for best_so_far, score in zip(carry, (weights, logp), strict=True)
        )

    lanes = min(LANES, width)
    nothing = tuple(
        jnp.full((8, lanes), value, dtype)
        for value, dtype in ((-jnp.inf, jnp.float32), (0, jnp.int32), (-jnp.inf, jnp.float32))
    )
    in_lanes = _sweep(width, lanes, visit, (nothing, nothing))
    (score, token, logp), (_, other, other_logp) = map(_best_of_lanes, in_lanes)
    left = score > -jnp.inf
    token_ref[0] = jnp.where(left, token, other)
    logp_ref[0] = jnp.where(left, logp, other_logp)


def _sweep(width: int, lanes: int, visit, start):
    """All columns of the row; the last piece may begin within the one before, which changes nothing."""

    def piece(i, carry):
        first = jnp.minimum(i * lanes, width - lanes)
        return visit(pl.multiple_of(first, 128), lanes, carry)

    return jax.lax.fori_loop(0, pl.cdiv(width, lanes), piece, start)


def _better(best_so_far, score, token, logp):
    """The better of two in each place; the earlier one, of lower id, if they are equal."""
    better, new = score > best_so_far[0], (score, token, logp)
    return tuple(jnp.where(better, one, old) for one, old in zip(new, best_so_far, strict=True))


def _best_of_lanes(in_lanes):
    """The best of all places, of equal ones that of the lowest id."""
    score, token, logp = in_lanes
    best = jnp.max(score, keepdims=True)
    winner = jnp.min(jnp.where(score == best, token, jnp.int32(2**31 - 1)), keepdims=True)
    own = jnp.max(jnp.where((score == best) & (token == winner), logp, -jnp.inf), keepdims=True)
    return best, jnp.where(best > -jnp.inf, winner, 0), own
