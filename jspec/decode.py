"""The loop: prefill, then rounds of propose, verify and commit, in one compiled program.

`make_decoder` takes a target, a drafter and a verification rule, all values, and gives
pure functions: ``init`` a state from prompts, ``propose`` and ``advance`` it, both at
once as ``step``, or to the end as ``run``, one `lax.while_loop` with nothing returned
to the host. (`jspec.stream` is a Python loop around the same step.)

Static: the three values, B, S (token slots), Q (stop ids), N, P, ``chunk`` and
``logprobs``. Traced: all of a `Request`, so that others of the same shape never compile
again. A cache holds ``slots >= prompt + new tokens + max(N, chunk)`` entries
(`jspec.cache.capacity`); ``tokens`` has as many slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec import ragged, tree
from jspec.sampling import keys, policy, walk
from jspec.sampling.verify import Verifier, check_legal
from jspec.types import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    Context,
    Drafter,
    Emitted,
    Info,
    Logprobs,
    Model,
    Params,
    Proposal,
    Request,
    State,
    Stats,
    Verdict,
)


@dataclass(frozen=True, eq=False)
class Decoder:
    """Compiled functions; each may also be called inside a larger jitted program.

    A state that is passed in is given away (donated): use the one that comes back.

    * ``init(params, dparams, request) -> State``: allocates the caches and runs the
      prompts through, ``chunk`` tokens at a time. A row ends at ``min(limit,
      target.max_length)`` tokens, prompt included, or with the first emitted token of
      its ``stop`` set, which is still emitted.
    * ``propose(params, dparams, state) -> (Proposal, State)``.
    * ``advance(params, dparams, state, proposal) -> (State, Info)``: verifies a proposal
      from anywhere.
    * ``step(params, dparams, state) -> (State, Info)``: the two together.
    * ``run(params, dparams, state) -> State``: steps until every row has finished.
    """

    init: Callable[..., State]
    propose: Callable[..., tuple[Proposal, State]]
    advance: Callable[..., tuple[State, Info]]
    step: Callable[..., tuple[State, Info]]
    run: Callable[..., State]
    nodes: int
    chunk: int


@dataclass(frozen=True, eq=False)
class Parts:
    """The static values that a loop is made of."""

    target: Model
    drafter: Drafter
    verifier: Verifier
    chunk: int
    logprobs: bool
    narrow: bool
    decide: Callable[..., Verdict]

    @property
    def paths(self) -> int:
        return self.drafter.depth + 1


def make_decoder(
    target: Model,
    drafter: Drafter,
    verifier: Verifier,
    *,
    chunk: int = 64,
    logprobs: bool = False,
    narrow: bool = True,
    decide: Callable[..., Verdict] = walk.decide,
) -> Decoder:
    """Build the compiled loop of a target, a drafter and a verification rule.

    ``logprobs``: keep those of the emitted tokens in ``state.logprobs``. ``narrow``: a
    round in which no row drafts runs a pass of one row; False: every pass has N rows, so
    that the same sums are rounded in the same order. ``decide``: what makes the verdict,
    `jspec.sampling.walk.decide` or a kernel of its signature. Raises `JspecError` for a drafter and
    a rule that do not fit together.
    """
    check_legal(verifier, drafter.growth)
    parts = Parts(target, drafter, verifier, chunk, logprobs, narrow, decide)

    def propose(params, dparams, state: State) -> tuple[Proposal, State]:
        proposal, draft = drafter.propose(dparams, state.draft, _root(state), _context(verifier, state))
        return proposal, state._replace(draft=draft)

    def advance(params, dparams, state: State, proposal: Proposal) -> tuple[State, Info]:
        proposal = proposal._replace(count=_useful(proposal, _remaining(state)))

        def full(state):
            return verify_round(parts, params, dparams, state, proposal)

        if proposal.tokens.shape[1] == 1 or not narrow:
            return full(state)

        def root_only(state):
            alone = Proposal(proposal.tokens[:, :1], tree.chain(state.length.shape[0], 1), proposal.count)
            return verify_round(parts, params, dparams, state, alone)

        drafted = jnp.any(proposal.count > 1)
        return _either(drafted, full, root_only, state, _no_info(state, parts.paths))

    def step(params, dparams, state: State) -> tuple[State, Info]:
        proposal, state = propose(params, dparams, state)
        return advance(params, dparams, state, proposal)

    def run(params, dparams, state: State) -> State:
        def running(state):
            return jnp.any(state.finish == RUNNING)

        return jax.lax.while_loop(running, lambda state: step(params, dparams, state)[0], state)

    def compiled(function):
        return jax.jit(function, donate_argnums=2)

    return Decoder(
        init=jax.jit(lambda params, dparams, request: start(parts, params, dparams, request)),
        propose=compiled(propose),
        advance=compiled(advance),
        step=compiled(step),
        run=compiled(run),
        nodes=drafter.nodes,
        chunk=chunk,
    )


def start(parts: Parts, params: Params, dparams: Params, request: Request) -> State:
    """Allocate the caches and run the prompts through."""
    batch, slots = request.tokens.shape
    limit = jnp.minimum(request.limit, parts.target.max_length)
    counts = jnp.zeros((batch, parts.paths - 1), jnp.int32)
    scratch = max(parts.drafter.nodes, parts.chunk)
    nothing = jnp.zeros((batch, slots), jnp.float32)
    state = State(
        cache=parts.target.init_cache(batch, slots, scratch),
        draft=parts.drafter.init(dparams, batch, slots, scratch),
        tokens=request.tokens,
        length=request.length,
        prompt_length=request.length,
        limit=limit,
        stop=request.stop,
        policy=request.policy,
        key=request.key,
        finish=jnp.where(request.length < limit, RUNNING, LENGTH),
        stats=Stats(jnp.zeros((batch,), jnp.int32), counts, counts),
        logprobs=Logprobs(nothing, nothing) if parts.logprobs else None,
    )
    return prefill(parts, params, dparams, state)


def prefill(parts: Parts, params: Params, dparams: Params, state: State) -> State:
    """Run x_0 .. x_{P-2} of each prompt through the target and all of it into the draft.

    A chunk [s, e) brings the features f_s .. f_{e-1}, which predicted x_{s+1} .. x_e; so
    the draft gets x_0 first, alone and with a feature of zeros. A prompt of one token
    runs no target pass at all.
    """
    target, drafter, chunk = parts.target, parts.drafter, parts.chunk
    batch = state.length.shape[0]
    last = state.length - 1
    layout = tree.chain(batch, chunk)
    feature = jnp.zeros((batch, 1, target.feature_width), jnp.float32)
    first = Emitted(state.tokens[:, :1], jnp.minimum(state.length, 1), feature)
    draft = drafter.absorb(dparams, state.draft, first)

    def body(carry):
        start, cache, draft = carry
        count = jnp.clip(last - start, 0, chunk)
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, chunk, axis=1)
        following = jax.lax.dynamic_slice_in_dim(jnp.roll(state.tokens, -1, axis=1), start, chunk, axis=1)
        _, features, cache = target.forward(params, cache, tokens, layout)
        draft = drafter.absorb(dparams, draft, Emitted(following, count, features))
        return start + chunk, target.commit(cache, None, count), draft

    def unfinished(carry):
        return jnp.any(carry[0] < last)

    _, cache, draft = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state.cache, draft))
    return state._replace(cache=cache, draft=draft)


def verify_round(
    parts: Parts, params: Params, dparams: Params, state: State, proposal: Proposal
) -> tuple[State, Info]:
    """One target pass over the proposal's nodes, and all that follows from it."""
    hidden, features, cache = parts.target.forward(params, state.cache, proposal.tokens, proposal.tree)
    logits = parts.target.unembed(params, hidden)
    depth = min(parts.paths, proposal.tokens.shape[1]) - 1
    verdict = parts.decide(
        parts.verifier, state.policy, _history(state), state.key, state.length - 1, proposal, logits, depth
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
        draft=parts.drafter.absorb(dparams, state.draft, emitted),
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
    """Add those of the emitted tokens, each under the law of the node that it follows."""
    if state.logprobs is None:
        return None
    found = jnp.take_along_axis(_along(logits, verdict.path), verdict.tokens[:, :, None], axis=2)[:, :, 0]
    raw = found - _along(jax.nn.logsumexp(logits, axis=-1), verdict.path)
    return Logprobs(
        ragged.append(state.logprobs.processed, state.length, verdict.logprob.astype(jnp.float32), count),
        ragged.append(state.logprobs.raw, state.length, raw.astype(jnp.float32), count),
    )


def _emit(state: State, verdict: Verdict):
    """The tokens that a verdict adds, cut at the limit and after the first stop token."""
    index = jnp.arange(verdict.path.shape[1])
    tokens = verdict.tokens.astype(state.tokens.dtype)
    count = jnp.minimum(verdict.accepted + verdict.ok, _remaining(state))
    stops = jnp.any(tokens[:, :, None] == state.stop[:, None, :], axis=-1) & (index < count[:, None])
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, count)
    outcome = jnp.where(verdict.ok, RUNNING, ERROR)
    outcome = jnp.where(state.length + count >= state.limit, LENGTH, outcome)
    outcome = jnp.where(stopped, STOP, outcome)
    return tokens, count, jnp.where(state.finish == RUNNING, outcome, state.finish)


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


def _history(state: State) -> policy.History:
    return policy.History(state.tokens, state.length, state.prompt_length, state.stop)


def _context(verifier: Verifier, state: State) -> Context:
    """A drafter's noise is its own, except under the coupled rule, where it is the target's."""
    position = state.length - 1
    if verifier.coupled:
        key, offset = keys.coupled_keys(state.key), position
    else:
        key, offset = keys.draft_keys(state.key, position), jnp.zeros_like(position)
    return Context(position, state.policy, _history(state), key, offset)


def _root(state: State) -> Int[Array, "B"]:
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]


def _remaining(state: State) -> Int[Array, "B"]:
    """How many tokens each row may still emit: 0 once it has finished."""
    return jnp.where(state.finish == RUNNING, state.limit - state.length, 0)


def _useful(proposal: Proposal, remaining: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many nodes to judge: what a chain drafts beyond the tokens that may be emitted is dropped."""
    most = remaining if proposal.tree.mask is None else jnp.where(remaining > 1, proposal.tokens.shape[1], 1)
    return jnp.clip(proposal.count, 1, jnp.maximum(most, 1))


def _no_info(state: State, paths: int) -> Info:
    zero = jnp.zeros_like(state.length)
    return Info(jnp.zeros((zero.shape[0], paths), state.tokens.dtype), zero, zero, zero, state.finish)


def _either(predicate: Array, yes: Callable, no: Callable, state: State, info: Info) -> tuple[State, Info]:
    """``yes(state) if predicate else no(state)``, without copying the cache.

    `lax.cond` over the cache copies it (jax 0.10); a loop of one trip or none does not.
    """

    def once(wanted, function, carry):
        def body(carry):
            return False, *function(carry[1])

        return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, *carry))[1:]

    carry = once(predicate, yes, (state, info))
    return once(~predicate, no, carry)
