"""Fused verification of logits whose vocabulary is sharded over a mesh axis, never gathered.

Each shard reduces its own slice; histograms and single numbers cross the network, in at
most 6 steps that wait for each other:

1. to 5. each row's distribution (`jspec.sharding.row_stats`), and with its first step the own logit of
   every drafted token; two steps where no sequence uses top-k or top-p;
6. the last draw, a Gumbel argmax: each shard's best score, id and log p. With it go the block
   verifier's sums.

Static: mesh, axis, shapes, verifier. Traced: all data. All other mesh axes are left to XLA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from jspec.errors import JspecError
from jspec.pallas.verify import fused, reference
from jspec.pallas.verify.reference import LastDraw, RowStats
from jspec.sampling import distribution, keys, siblings, verifiers, walk
from jspec.sampling.verifiers.block import chances as block_chances
from jspec.sampling.verifiers.block import reach_of
from jspec.sharding import row_stats
from jspec.sharding.row_stats import Slice
from jspec.types import History, Policy, Proposal, Verdict, Verifier

log = logging.getLogger(__name__)

MAX_VOCAB = 2**24
"""Ids cross the network as float32."""


def make(mesh: Mesh, axis: str) -> Callable[..., Verdict]:
    """Build a ``decide`` for logits [B, N, V] (and draft distributions) whose V is sharded over a mesh axis.

    It has the signature of `jspec.sampling.walk.decide`. Everything else that it takes is replicated
    over that axis, and so is the verdict.
    (A bias sharded over V is allowed; whether any is used is then one more exchange, before the others.)

    Verifiers without a fused form (`jspec.pallas.verify.fused`), and rounds in which a row uses a
    sampling setting that it does not know, go by the plain walk, under whatever exchange XLA chooses
    for it; the log says so.

    Raises:
        JspecError: no such axis, or one that is not of type Auto; in ``decide``: V is no
            multiple of the shards (pad the head; ids of -inf are legal), or is too large.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    >>> make(mesh, "data")
    Traceback (most recent call last):
    jspec.errors.JspecError: the mesh has no axis 'data'; its axes are model
    """
    if axis not in mesh.axis_names:
        raise JspecError(f"the mesh has no axis {axis!r}; its axes are {', '.join(mesh.axis_names)}")
    kind = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis]
    if kind != jax.sharding.AxisType.Auto:
        raise JspecError(f"the mesh axis {axis!r} is of type {kind.name}; it must be of type Auto")
    shards = mesh.shape[axis]

    def decide(
        verifier: Verifier,
        policy: Policy,
        history: History,
        key: UInt32[Array, "B 2"],
        position: Int[Array, "B"],
        proposal: Proposal,
        logits: Float[Array, "B N V"],
        depth: int,
    ) -> Verdict:
        verifiers.check_legal(verifier, "chain" if proposal.tree.mask is None else "tree")
        _check_vocab(logits.shape[-1], axis, shards)

        def plain() -> Verdict:
            return walk.decide(verifier, policy, history, key, position, proposal, logits, depth)

        if fused.fused_form(verifier, proposal) is None:
            log.info("the verifier %r is judged by plain code on sharded logits", verifier.name)
            return plain()
        drafts = siblings.without_foreign_ids(proposal, logits.shape[-1])

        def judge(adjusted: bool) -> Verdict:
            everywhere, wide = PartitionSpec(), PartitionSpec(None, None, axis)
            by_id, own = (jax.tree.map(lambda _: everywhere, whole) for whole in (policy, drafts))
            by_id = by_id._replace(bias=PartitionSpec(None, axis))
            own = own._replace(logq=None if drafts.logq is None else wide)
            local = jax.shard_map(
                lambda *given: _judge(axis, shards, adjusted, verifier, depth, *given),
                mesh=mesh,
                in_specs=(by_id, everywhere, everywhere, everywhere, own, wide),
                out_specs=everywhere,
                axis_names={axis},
            )
            return local(policy, history, key, position, drafts, logits)

        def by_slices() -> Verdict:
            changed = distribution.is_adjusted(policy, history, drafts.tree)
            return jax.lax.cond(changed, lambda: judge(True), lambda: judge(False))

        return fused.or_plain_where_in_use(_unknown_fields(), policy, by_slices, plain)

    return decide


KNOWN_BEFORE_TEMPERATURE = frozenset(
    {"bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens"}
)
"""Fields whose steps a shard can apply to its slice alone, given ids of the slice."""


def _unknown_fields() -> list[str]:
    before = [name for step in distribution.BEFORE_TEMPERATURE for name in step.fields]
    return [name for name in before if name not in KNOWN_BEFORE_TEMPERATURE] + fused.unknown_fields()


def _check_vocab(vocab: int, axis: str, shards: int) -> None:
    if vocab % shards:
        raise JspecError(
            f"a vocabulary of {vocab} ids does not divide by the {shards} shards of the mesh axis {axis!r}: "
            f"pad the head to {-(-vocab // shards) * shards} ids, with logits of -inf"
        )
    if vocab > MAX_VOCAB:
        raise JspecError(f"a vocabulary of {vocab} ids is too large: at most {MAX_VOCAB} can be sharded")


def _judge(
    axis: str,
    shards: int,
    adjusted: bool,
    verifier: Verifier,
    depth: int,
    policy: Policy,
    history: History,
    key: UInt32[Array, "B 2"],
    position: Int[Array, "B"],
    proposal: Proposal,
    x: Float[Array, "B N W"],
) -> Verdict:
    """On one shard: everything but ``x``, ``logq`` and the bias is the same on all."""
    width = x.shape[-1]
    part = Slice(axis, shards, jax.lax.axis_index(axis) * width, width)
    if adjusted:
        here = history._replace(
            tokens=_local(part, history.tokens), stop_token_ids=_local(part, history.stop_token_ids)
        )
        tokens = _local(part, proposal.tokens)
        x = distribution.adjust(policy, here, tokens, proposal.tree, x.astype(jnp.float32))
    reads = fused.Reads(
        stats_and_entries=lambda *given: row_stats.stats_and_entries(part, *given),
        gumbel_argmax=lambda *given: gumbel_argmax(part, *given),
        entry=lambda x, node, token: _entry(part, x, node, token),
        greatest=lambda x: row_stats.greatest(part, x),
        each=lambda draw, nodes: jax.vmap(draw)(nodes),  # one exchange for all, not one each
        block=lambda round, reads, depth: _block(part, round, reads, depth),
    )
    return fused.judge_by(reads, verifier, policy, key, position, proposal, x, depth)


def _local(part: Slice, ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Ids within the slice; its width, which is beyond it, for those of other shards."""
    own = ids - part.first
    return jnp.where((own >= 0) & (own < part.width), own, part.width)


def _entry(
    part: Slice, x: Float[Array, "B N W"], node: Int[Array, "B M"], token: Int[Array, "B M"]
) -> Float[Array, "B M"]:
    """Single logits, from the shards that have them."""
    own = _local(part, token)
    value = x[jnp.arange(x.shape[0])[:, None], node, jnp.minimum(own, part.width - 1)].astype(jnp.float32)
    return jax.lax.pmax(jnp.where(own < part.width, value, -jnp.inf), part.axis)


def gumbel_argmax(
    part: Slice,
    policy: Policy,
    x: Float[Array, "B N W"],
    stats: RowStats,
    last: LastDraw,
    logq: Float[Array, "B N W"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draw each sequence's last token, under `jax.shard_map`.

    `jspec.pallas.verify.reference.gumbel_argmax_ref` says what is drawn.
    """
    here = stats._replace(best=stats.best - part.first)
    refused = jnp.where(last.refused < 0, -1, _local(part, last.refused))
    logp, weights = reference.remaining(policy, x, here, last._replace(refused=refused), logq)
    noise = jax.vmap(lambda key: _noise(part, key))(last.key)

    def candidate(weights: Array) -> list[Array]:
        """The best of the slice: score, id, log p."""
        score = weights + noise
        own = keys.best(score)[:, None]
        score, logp_of = (jnp.take_along_axis(of, own, axis=1)[:, 0] for of in (score, logp))
        return [score, (part.first + own[:, 0]).astype(jnp.float32), logp_of]

    ours = jnp.stack(candidate(weights) + candidate(logp), axis=-1)
    mine = (jnp.arange(part.shards) == jax.lax.axis_index(part.axis))[:, None, None]
    all_of_them = jax.lax.psum(jnp.where(mine, ours, 0), part.axis)  # [shards, B, 6]
    some = jnp.any(all_of_them[..., 0] > -jnp.inf, axis=0)[:, None]
    final = jnp.where(some, all_of_them[..., :3], all_of_them[..., 3:])
    winner = jnp.argmax(final[..., 0], axis=0)  # of equal ones the first shard's, as the lowest id wins
    _, token, logp_of = jnp.take_along_axis(final, winner[None, :, None], axis=0)[0].T
    return token.astype(jnp.int32), logp_of


def _noise(part: Slice, key: UInt32[Array, "2"]) -> Float[Array, "W"]:
    """The slice's part of `keys.gumbel`: a word of `jax.random.bits` is what folding in its
    index gives, both halves combined."""

    def word(index: Array) -> Array:
        halves = jax.random.key_data(jax.random.fold_in(keys.wrap(key), index))
        return halves[0] ^ halves[1]

    ids = (part.first + jnp.arange(part.width)).astype(jnp.uint32)
    return keys.gumbel_of_bits(jax.vmap(word)(ids), jax.vmap(word)(ids + jnp.uint32(part.vocab)))


def _block(part: Slice, round: fused.Round, reads: fused.Reads, depth: int) -> Verdict:
    """The block verifier. Its last draw depends on its sums, and would be a step more: instead every
    node draws beside the sums (noise for N rows, not for one)."""
    proposal, nodes = round.proposal, jnp.arange(round.logp.shape[1])
    reach = jax.vmap(reach_of)(round.logp - round.log_q, proposal.count)

    rows = reference.log_probs(
        round.policy, round.stats._replace(best=round.stats.best - part.first), round.x
    )
    child = jnp.minimum(nodes + 1, nodes.size - 1)
    point = (jnp.arange(part.width) == _local(part, proposal.tokens)[..., None]).astype(jnp.float32)
    assert proposal.logq is not None  # of point masses the block verifier is the token verifier
    q = jnp.where(round.drawn[..., None], jnp.exp(proposal.logq), point)[:, child]
    total = jnp.sum(jnp.maximum(jnp.exp(rows + reach[..., None]) - q, 0.0), axis=-1)
    chance = jax.vmap(block_chances)(proposal, jax.lax.psum(total, part.axis), reach)

    def draw(node: Array) -> tuple[Array, Array]:
        last = fused.last_draw(round, reach, jnp.full_like(round.position, node))
        return reads.gumbel_argmax(round.policy, round.x, round.stats, last, proposal.logq)

    tokens, logp = reads.each(draw, nodes)

    def drawn_already(policy: Any, x: Any, stats: Any, last: LastDraw, logq: Any) -> tuple[Array, Array]:
        token, log_p = (jnp.take_along_axis(of.T, last.node[:, None], axis=1)[:, 0] for of in (tokens, logp))
        return token, log_p

    return fused.walk_by_chances(round, drawn_already, chance, reach, depth)
