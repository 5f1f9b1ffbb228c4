"""One round of the loop: a target pass over the drafted nodes, the verdict, and all that follows from it.

`jspec.decode` makes the loop of these rounds. A round emits what the verdict adds, cut at the row's
``max_length`` and after its first stop token, commits the accepted path, and lets the drafter
take in what was emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec import ragged
from jspec.sampling import keys
from jspec.types import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    Context,
    Drafter,
    Emitted,
    History,
    Info,
    Logprobs,
    Model,
    Params,
    Proposal,
    State,
    Stats,
    Verdict,
    Verifier,
)

Decide = Callable[..., Verdict]
"""From logits to a verdict, with the signature of `jspec.sampling.walk.decide`."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The static values that a loop is made of."""

    target: Model
    drafter: Drafter
    verifier: Verifier
    chunk: int
    logprobs: bool
    skip_empty_rounds: bool
    decide: Decide

    @property
    def paths(self) -> int:
        return self.drafter.depth + 1


def verify_round(
    parts: Parts, params: Params, draft_params: Params, state: State, proposal: Proposal
) -> tuple[State, Info]:
    """One target pass over the proposal's nodes, and all that follows from it."""
    hidden, features, cache = parts.target.forward(params, state.cache, proposal.tokens, proposal.tree)
    logits = parts.target.unembed(params, hidden)
    depth = min(parts.paths, proposal.tokens.shape[1]) - 1
    verdict = parts.decide(
        parts.verifier, state.policy, history_of(state), state.key, state.length - 1, proposal, logits, depth
    )
    tokens, count, finish = _emit(state, verdict)
    emitted = Emitted(tokens, count, _along(features, verdict.path))
    path = None if proposal.tree.mask is None else verdict.path
    proposed, accepted = _depths(proposal, verdict, count, parts.paths - 1)
    active = (state.finish == RUNNING)[:, None]
    proposed, accepted = proposed & active, accepted & active
    stats = Stats(
        state.stats.rounds + active[:, 0],
        state.stats.proposed + proposed,
        state.stats.accepted + accepted,
    )
    new = state._replace(
        cache=parts.target.commit(cache, path, count),
        draft=parts.drafter.absorb(draft_params, state.draft, emitted),
        tokens=ragged.append(state.tokens, state.length, tokens, count),
        length=state.length + count,
        finish=finish,
        stats=stats,
        logprobs=_logprobs(state, logits, verdict, count),
    )
    padded = jnp.pad(tokens, ((0, 0), (0, parts.paths - tokens.shape[1])))
    info = Info(padded, count, accepted.sum(1, dtype=jnp.int32), proposed.sum(1, dtype=jnp.int32), finish)
    return new, info


def _logprobs(state: State, logits: Array, verdict: Verdict, count: Array) -> Logprobs | None:
    """Add those of the emitted tokens, each under the distribution of the node that it follows."""
    if state.logprobs is None:
        return None
    found = jnp.take_along_axis(_along(logits, verdict.path), verdict.tokens[:, :, None], axis=2)[:, :, 0]
    raw = found - _along(jax.nn.logsumexp(logits, axis=-1), verdict.path)
    return Logprobs(
        ragged.append(state.logprobs.processed, state.length, verdict.logprob.astype(jnp.float32), count),
        ragged.append(state.logprobs.raw, state.length, raw.astype(jnp.float32), count),
    )


def _emit(state: State, verdict: Verdict) -> tuple[Int[Array, "B P"], Int[Array, "B"], Int[Array, "B"]]:
    """The tokens that a verdict adds, cut at the limit and after the first stop token."""
    index = jnp.arange(verdict.path.shape[1])
    tokens = verdict.tokens.astype(state.tokens.dtype)
    count = jnp.minimum(verdict.accepted + verdict.ok, remaining(state))
    stops = jnp.any(tokens[:, :, None] == state.stop_token_ids[:, None, :], axis=-1) & (
        index < count[:, None]
    )
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, count).astype(jnp.int32)
    outcome = jnp.where(verdict.ok, RUNNING, ERROR)
    outcome = jnp.where(state.length + count >= state.max_length, LENGTH, outcome)
    outcome = jnp.where(stopped, STOP, outcome)
    return tokens, count, jnp.where(state.finish == RUNNING, outcome, state.finish).astype(jnp.int32)


def _depths(
    proposal: Proposal, verdict: Verdict, count: Int[Array, "B"], depth: int
) -> tuple[Bool[Array, "B depth"], Bool[Array, "B depth"]]:
    """At which depths drafts were submitted and accepted; none beyond a cut is counted."""
    level = jnp.arange(1, depth + 1)
    real = jnp.arange(proposal.tokens.shape[1]) < proposal.count[:, None]
    there = real[:, None, :] & (proposal.tree.depth[:, None, :] == level[:, None])
    whole = verdict.accepted + verdict.ok == count
    in_text = whole[:, None] | (level <= count[:, None])
    return jnp.any(there, axis=-1) & in_text, (level <= verdict.accepted[:, None]) & in_text


def _along(values: Array, path: Int[Array, "B P"]) -> Array:
    """Pick nodes of a [B, N, ...] array."""
    index = path.reshape(*path.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=1)


def history_of(state: State) -> History:
    return History(state.tokens, state.length, state.prompt_length, state.stop_token_ids)


def context_of(verifier: Verifier, state: State) -> Context:
    """A drafter's noise is its own, except under the coupled verifier, where it is the target's."""
    position = state.length - 1
    if verifier.coupled:
        key, offset = keys.coupled_keys(state.key), position
    else:
        key, offset = keys.draft_keys(state.key, position), jnp.zeros_like(position)
    return Context(position, state.policy, history_of(state), key, offset)


def root_of(state: State) -> Int[Array, "B"]:
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]


def remaining(state: State) -> Int[Array, "B"]:
    """How many tokens each row may still emit: 0 once it has finished."""
    return jnp.where(state.finish == RUNNING, state.max_length - state.length, 0)


def useful_count(proposal: Proposal, remaining: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many nodes to judge: what a chain drafts beyond the tokens that may be emitted is dropped."""
    most = remaining if proposal.tree.mask is None else jnp.where(remaining > 1, proposal.tokens.shape[1], 1)
    return jnp.clip(proposal.count, 1, jnp.maximum(most, 1))


def no_info(state: State, paths: int) -> Info:
    zero = jnp.zeros_like(state.length)
    return Info(jnp.zeros((zero.shape[0], paths), state.tokens.dtype), zero, zero, zero, state.finish)
