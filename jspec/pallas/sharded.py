"""Fused verification of logits whose vocabulary is sharded over a mesh axis, never gathered.

Each shard reduces its own slice; histograms and single numbers cross the network, in at
most 6 steps that wait for each other:

1. to 5. each row's law (`jspec.pallas.slices`), and with its first step the own logit of
   every drafted token; two steps where no sequence uses top-k or top-p;
6. the race: each shard's best score, id and log p. With it go the block rule's sums.

Static: mesh, axis, shapes, rule. Traced: all data. All other mesh axes are left to XLA.
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
from jspec.pallas import law as laws
from jspec.pallas import slices
from jspec.pallas import verify as fused
from jspec.pallas.law import End, Summary
from jspec.pallas.slices import Slice
from jspec.sampling import keys, verify, walk
from jspec.sampling import policy as target_law
from jspec.sampling.policy import History, Policy
from jspec.sampling.verify import Verifier
from jspec.types import Proposal, Verdict

log = logging.getLogger(__name__)

MAX_VOCAB = 2**24
"""Ids cross the network as float32."""


def make(mesh: Mesh, axis: str) -> Callable[..., Verdict]:
    """Build a ``decide`` with the signature of `jspec.sampling.walk.decide` for logits
    [B, N, V] (and draft laws) whose V is sharded over a mesh axis. Everything else that it
    takes is replicated over that axis, and so is the verdict.
    (A bias sharded over V is allowed; whether any is used is then one more exchange, before the others.)

    Rules without a fused form (`jspec.pallas.verify`) go by the plain walk, under whatever
    exchange XLA chooses for it, and the reason is logged.

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
        verify.check_legal(verifier, "chain" if proposal.tree.mask is None else "tree")
        _check_vocab(logits.shape[-1], axis, shards)
        if fused.rule_of(verifier, proposal) is None:
            log.info("the rule %r is judged by plain code on sharded logits", verifier.name)
            return walk.decide(verifier, policy, history, key, position, proposal, logits, depth)

        def judge(adjusted: bool) -> Verdict:
            everywhere, wide = PartitionSpec(), PartitionSpec(None, None, axis)
            by_id, own = (jax.tree.map(lambda _: everywhere, whole) for whole in (policy, proposal))
            by_id = by_id._replace(bias=PartitionSpec(None, axis))
            own = own._replace(logq=None if proposal.logq is None else wide)
            local = jax.shard_map(
                lambda *given: _judge(axis, shards, adjusted, verifier, depth, *given),
                mesh=mesh,
                in_specs=(by_id, everywhere, everywhere, everywhere, own, wide),
                out_specs=everywhere,
                axis_names={axis},
            )
            return local(policy, history, key, position, proposal, logits)

        changed = target_law.is_adjusted(policy, history, proposal.tree)
        return jax.lax.cond(changed, lambda: judge(True), lambda: judge(False))

    return decide


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
        here = history._replace(tokens=_local(part, history.tokens), stop=_local(part, history.stop))
        tokens = _local(part, proposal.tokens)
        x = target_law.adjust(policy, here, tokens, proposal.tree, x.astype(jnp.float32))
    reads = fused.Reads(
        survey=lambda *given: slices.survey(part, *given),
        race=lambda *given: race(part, *given),
        entry=lambda x, node, token: _entry(part, x, node, token),
        greatest=lambda x: slices.greatest(part, x),
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


def race(
    part: Slice,
    policy: Policy,
    x: Float[Array, "B N W"],
    summary: Summary,
    end: End,
    logq: Float[Array, "B N W"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draw each sequence's last token (`jspec.pallas.law.race_ref`), under `jax.shard_map`."""
    here = summary._replace(best=summary.best - part.first)
    refused = jnp.where(end.refused < 0, -1, _local(part, end.refused))
    logp, weights = laws.left(policy, x, here, end._replace(refused=refused), logq)
    noise = jax.vmap(lambda key: _noise(part, key))(end.key)

    def runner(weights: Array) -> list[Array]:
        """The best of the slice: score, id, log p."""
        score = weights + noise
        own = keys.best(score)[:, None]
        score, logp_of = (jnp.take_along_axis(of, own, axis=1)[:, 0] for of in (score, logp))
        return [score, (part.first + own[:, 0]).astype(jnp.float32), logp_of]

    ours = jnp.stack(runner(weights) + runner(logp), axis=-1)
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
    """The block rule. Its race depends on its sums, and would be a step more: instead every
    node's race is run beside the sums (noise for N rows, not for one)."""
    proposal, nodes = round.proposal, jnp.arange(round.logp.shape[1])
    reach = jax.vmap(verify.reach_of)(round.logp - round.log_q, proposal.count)

    rows = laws.law(round.policy, round.summary._replace(best=round.summary.best - part.first), round.x)
    child = jnp.minimum(nodes + 1, nodes.size - 1)
    point = (jnp.arange(part.width) == _local(part, proposal.tokens)[..., None]).astype(jnp.float32)
    assert proposal.logq is not None  # of point masses the block rule is the token rule
    q = jnp.where(round.drawn[..., None], jnp.exp(proposal.logq), point)[:, child]
    total = jnp.sum(jnp.maximum(jnp.exp(rows + reach[..., None]) - q, 0.0), axis=-1)
    chance = jax.vmap(verify.block_chances)(proposal, jax.lax.psum(total, part.axis), reach)

    def draw(node: Array) -> tuple[Array, Array]:
        end = fused.end_at(round, reach, jnp.full_like(round.position, node))
        return reads.race(round.policy, round.x, round.summary, end, proposal.logq)

    tokens, logp = reads.each(draw, nodes)

    def drawn_already(policy: Any, x: Any, summary: Any, end: End, logq: Any) -> tuple[Array, Array]:
        token, log_p = (jnp.take_along_axis(of.T, end.node[:, None], axis=1)[:, 0] for of in (tokens, logp))
        return token, log_p

    return fused.random(round, drawn_already, chance, reach, depth)
