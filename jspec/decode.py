"""The loop: prefill, then rounds of propose, verify and commit, in one compiled program.

`make_decoder` takes a target, a drafter and a verifier, all values, and gives
pure functions: ``init`` a state from prompts, ``propose`` and ``advance`` it, both at
once as ``step``, or to the end as ``run``, one `lax.while_loop` with nothing returned
to the host. (`jspec.serve.stream` is a Python loop around the same step.)

Static: the three values, B, S (token slots), Q (stop ids), N, P, ``chunk`` and
``logprobs``. Traced: all of a `Request`, so that others of the same shape never compile
again. A cache holds ``slots >= prompt + new tokens + max(N, chunk)`` entries
(`jspec.cache.dense.capacity`); ``tokens`` has as many slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec import tree
from jspec.errors import JspecError, positive
from jspec.once import built_once
from jspec.rounds import Decide, Parts, context_of, no_info, remaining, root_of, useful_count, verify_round
from jspec.sampling import walk
from jspec.sampling.verifiers import check_legal, find_verifier
from jspec.types import (
    LENGTH,
    RUNNING,
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
    Verifier,
)

T = TypeVar("T")
Branch = Callable[[State], tuple[State, Info]]


@dataclass(frozen=True, eq=False)
class Decoder:
    """The compiled loop: functions that may also be called inside a larger jitted program.

    `make_decoder` builds it. A state that is passed in is given away (donated): use the one that comes back.

    * ``init(params, draft_params, request) -> State``: allocates the caches and runs the
      prompts through, ``chunk`` tokens at a time. A row ends at ``min(max_length,
      target.context_length)`` tokens, prompt included, or with the first emitted token of
      its ``stop_token_ids``, which is still emitted. Where the request is concrete it is checked.
    * ``propose(params, draft_params, state) -> (Proposal, State)``.
    * ``advance(params, draft_params, state, proposal) -> (State, Info)``: verifies a proposal
      from anywhere.
    * ``step(params, draft_params, state) -> (State, Info)``: the two together.
    * ``run(params, draft_params, state) -> State``: steps until every row has finished.
    """

    init: Callable[..., State]
    propose: Callable[..., tuple[Proposal, State]]
    advance: Callable[..., tuple[State, Info]]
    step: Callable[..., tuple[State, Info]]
    run: Callable[..., State]
    nodes: int  # of a pass: N
    chunk: int
    vocab_size: int
    context_length: int
    verifier: Verifier


@built_once
def make_decoder(
    target: Model,
    drafter: Drafter,
    verifier: str | Verifier = "token",
    *,
    chunk: int = 64,
    logprobs: bool = False,
    skip_empty_rounds: bool = True,
    decide: Decide = walk.decide,
) -> Decoder:
    """Build the compiled loop of a target, a drafter and a verifier; equal arguments give the same one.

    Args:
        target: the target model.
        drafter: what drafts; `jspec.drafters.none` for plain decoding.
        verifier: one of `jspec.verifiers.VERIFIERS` by name, or a verifier of one's own.
        chunk: prompt tokens a prefill pass.
        logprobs: keep those of the emitted tokens in ``state.logprobs``.
        skip_empty_rounds: a round in which no row drafts runs a pass of one row; False: every
            pass has N rows, so that the same sums are rounded in the same order.
        decide: what makes the verdict, plain code or the kernels of `jspec.pallas.select`.

    Returns:
        A `Decoder`; rows, slots and stop ids are those of the `Request` that it is given.

    Raises:
        JspecError: an unknown verifier, one that does not fit the drafter, ``chunk`` < 1.

    >>> from jspec import drafters, make_request
    >>> from jspec.models import table
    >>> decoder = make_decoder(table.make(3), drafters.ngram(2), "token", chunk=4)
    >>> params = jnp.log(jnp.array([[.1, .8, .1], [.1, .1, .8], [.8, .1, .1], [.3, .3, .4]]))
    >>> request = make_request(decoder, [[0, 1]], key=[7], max_new_tokens=4, temperature=0)
    >>> decoder.run(params, None, decoder.init(params, None, request)).tokens[0, :6].tolist()
    [0, 1, 2, 0, 1, 2]
    """
    judge = find_verifier(verifier) if isinstance(verifier, str) else verifier
    check_legal(judge, drafter.growth)
    parts = Parts(target, drafter, judge, positive("chunk", chunk), logprobs, skip_empty_rounds, decide)

    def propose(params: Params, draft_params: Params, state: State) -> tuple[Proposal, State]:
        proposal, draft = drafter.propose(draft_params, state.draft, root_of(state), context_of(judge, state))
        return proposal, state._replace(draft=draft)

    def advance(params: Params, draft_params: Params, state: State, proposal: Proposal) -> tuple[State, Info]:
        proposal = proposal._replace(count=useful_count(proposal, remaining(state)))

        def full(state: State) -> tuple[State, Info]:
            return verify_round(parts, params, draft_params, state, proposal)

        if proposal.tokens.shape[1] == 1 or not skip_empty_rounds:
            return full(state)

        def root_only(state: State) -> tuple[State, Info]:
            alone = Proposal(proposal.tokens[:, :1], tree.chain(state.length.shape[0], 1), proposal.count)
            return verify_round(parts, params, draft_params, state, alone)

        drafted = jnp.any(proposal.count > 1)
        return _either(drafted, full, root_only, state, no_info(state, parts.paths))

    def step(params: Params, draft_params: Params, state: State) -> tuple[State, Info]:
        proposal, state = propose(params, draft_params, state)
        return advance(params, draft_params, state, proposal)

    def run(params: Params, draft_params: Params, state: State) -> State:
        def running(state: State) -> Array:
            return jnp.any(state.finish == RUNNING)

        end: State = jax.lax.while_loop(running, lambda state: step(params, draft_params, state)[0], state)
        return end

    def compiled(function: Callable[..., T]) -> Callable[..., T]:
        return jax.jit(function, donate_argnums=2)

    allocate = jax.jit(lambda params, draft_params, request: start(parts, params, draft_params, request))

    def init(params: Params, draft_params: Params, request: Request) -> State:
        check_request(parts, request)
        state: State = allocate(params, draft_params, request)
        return state

    return Decoder(
        init=init,
        propose=compiled(propose),
        advance=compiled(advance),
        step=compiled(step),
        run=compiled(run),
        nodes=drafter.nodes,
        chunk=chunk,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        verifier=judge,
    )


def check_request(parts: Parts, request: Request) -> None:
    """Raise `JspecError` for a request that is concrete and cannot be run as it is."""
    parts_read = (request.length, request.max_length, request.policy.temperature)
    if any(isinstance(value, jax.core.Tracer) for value in parts_read):
        return
    length, end, temperature = jax.device_get(parts_read)  # before anything is launched
    slots, spare = request.tokens.shape[1], max(parts.drafter.nodes, parts.chunk)
    needed = spare + max(*length, *end.clip(max=parts.target.context_length))
    if needed > slots:
        raise JspecError(
            f"the request has {slots} slots and needs {needed}: the longest row and a pass of {spare} "
            "(jspec.make_request counts them)"
        )
    if (length < 1).any():
        raise JspecError(f"row {length.argmin()} of the request has no prompt: length {length.min()}")
    check_greedy(parts.verifier, temperature)


def check_greedy(verifier: Verifier, temperature: Any) -> None:
    """Raise `JspecError` where a verifier for temperature 0 would write its argmax instead of a draw."""
    traced = isinstance(temperature, jax.core.Tracer)
    if verifier.greedy_only and (traced or (temperature > 0).any()):
        raise JspecError(
            f"the verifier {verifier.name!r} is for temperature 0"
            + (", and the temperature is traced" if traced else f", not for {temperature.max():g}")
            + ": take the verifier 'token', which is the same there and right above it"
        )


def start(parts: Parts, params: Params, draft_params: Params, request: Request) -> State:
    """Allocate the caches and run the prompts through."""
    batch, slots = request.tokens.shape
    # Copies: `run` gives its state's buffers away, and these are the caller's, or twice the same.
    request = jax.tree.map(jnp.copy, request)
    numbers = (request.tokens, request.length, request.max_length, request.stop_token_ids)
    tokens, length, max_length, stop_token_ids = (x.astype(jnp.int32) for x in numbers)
    max_length = jnp.minimum(max_length, parts.target.context_length)
    scratch = max(parts.drafter.nodes, parts.chunk)

    def counts() -> Array:
        return jnp.zeros((batch, parts.paths - 1), jnp.int32)

    def nothing() -> Array:
        return jnp.zeros((batch, slots), jnp.float32)

    state = State(
        cache=parts.target.init_cache(batch, slots, scratch),
        draft=parts.drafter.init(draft_params, batch, slots, scratch),
        tokens=tokens,
        length=length,
        prompt_length=jnp.copy(length),
        max_length=max_length,
        stop_token_ids=stop_token_ids,
        policy=request.policy,
        key=request.key,
        finish=jnp.where(length < max_length, RUNNING, LENGTH).astype(jnp.int32),
        stats=Stats(jnp.zeros((batch,), jnp.int32), counts(), counts()),
        logprobs=Logprobs(nothing(), nothing()) if parts.logprobs else None,
    )
    return prefill(parts, params, draft_params, state)


def prefill(parts: Parts, params: Params, draft_params: Params, state: State) -> State:
    """Run x_0 .. x_{P-2} of each prompt through the target and all of it into the draft.

    A chunk [s, e) brings the features f_s .. f_{e-1}, which predicted x_{s+1} .. x_e; so
    the draft gets x_0 first, alone and with a feature of zeros. A prompt of one token
    runs no target pass at all.
    """
    target, drafter, chunk = parts.target, parts.drafter, parts.chunk
    batch = state.length.shape[0]
    last = state.length - 1
    layout = tree.chain(batch, chunk)
    feature = jnp.zeros((batch, 1, target.feature_size), jnp.float32)
    first = Emitted(state.tokens[:, :1], jnp.minimum(state.length, 1), feature)
    draft = drafter.absorb(draft_params, state.draft, first)

    def body(carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        start, cache, draft = carry
        count = jnp.clip(last - start, 0, chunk)
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, chunk, axis=1)
        following = jax.lax.dynamic_slice_in_dim(jnp.roll(state.tokens, -1, axis=1), start, chunk, axis=1)
        _, features, cache = target.forward(params, cache, tokens, layout)
        draft = drafter.absorb(draft_params, draft, Emitted(following, count, features))
        return start + chunk, target.commit(cache, None, count), draft

    def unfinished(carry: tuple[Array, Any, Any]) -> Array:
        return jnp.any(carry[0] < last)

    _, cache, draft = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state.cache, draft))
    return state._replace(cache=cache, draft=draft)


def _either(predicate: Array, yes: Branch, no: Branch, state: State, info: Info) -> tuple[State, Info]:
    """``yes(state) if predicate else no(state)``, without copying the cache.

    `lax.cond` over the cache copies it (jax 0.10); a loop of one trip or none does not.
    """

    def once(wanted: Array, function: Branch, state: State, info: Info) -> tuple[State, Info]:
        def body(carry: tuple[Any, State, Info]) -> tuple[Any, State, Info]:
            return False, *function(carry[1])

        _, state, info = jax.lax.while_loop(lambda carry: carry[0], body, (wanted, state, info))
        return state, info

    return once(~predicate, no, *once(predicate, yes, state, info))
