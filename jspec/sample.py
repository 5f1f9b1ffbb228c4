"""`speculative_sample`, the functional front door, and `make_request`, which lays out a `Request`.

Arrays in, arrays out, params an argument: `speculative_sample` may be called as it is, under
`jit`, or inside a larger program such as an RL step. Params and prompts are traced, so new
weights never compile again; equal settings are one program (`jspec.built_once`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.cache import dense
from jspec.decode import Decoder, check_greedy, make_decoder
from jspec.errors import JspecError, positive
from jspec.rounds import Decide
from jspec.sampling import keys, walk
from jspec.sampling import policy as policies
from jspec.sampling.drafters.none import none
from jspec.types import Drafter, Logprobs, Model, Params, Policy, Request, State, Stats, Verifier

ArrayLike = Any
"""A list, a NumPy or a JAX array, traced or not. Checked by hand, so that a mistake is a `JspecError`."""


class Samples(NamedTuple):
    """What was written. ``tokens`` and ``logprobs`` beyond a row's ``length`` are 0."""

    tokens: Int[Array, "B max_new_tokens"]
    length: Int[Array, "B"]  # new tokens, a stop token included
    finish: Int[Array, "B"]  # jspec.types: STOP, LENGTH or ERROR
    stats: Stats
    logprobs: Logprobs | None


def speculative_sample(
    params: Params,
    prompt_tokens: ArrayLike,
    *,
    target: Model,
    key: ArrayLike,
    drafter: Drafter | None = None,
    draft_params: Params = None,
    prompt_length: ArrayLike | None = None,
    max_new_tokens: int = 128,
    max_new_tokens_per_row: ArrayLike | None = None,
    stop_token_ids: ArrayLike | None = None,
    policy: Policy | None = None,
    verifier: str | Verifier = "token",
    chunk: int = 64,
    logprobs: bool = False,
    skip_empty_rounds: bool = True,
    decide: Decide = walk.decide,
    **sampling: Any,
) -> Samples:
    """Draw a continuation of each prompt from exactly the target distribution.

    Args:
        params: the target's; traced.
        prompt_tokens: Int[B, prompt], padded on the right, traced; or a list of prompts of any lengths.
        target: the target model; static.
        key: one `jax.random.key`, traced or not, or a seed for each row. A row's text
            depends on its own key, prompt and settings only.
        drafter: static; default: plain decoding.
        draft_params: the drafter's params; traced.
        prompt_length: Int[B], real tokens of each row, at least 1; default: all; traced.
        max_new_tokens: static; the arrays have room for so many.
        max_new_tokens_per_row: Int[B], new tokens of each row, where rows differ; traced.
        stop_token_ids: ids that end a row, [B, Q] where -1 fills the table, or [Q] for all rows; traced.
        policy: rows of sampling settings, traced; or give the settings of
            `jspec.sampling.policy.make` as keyword arguments, for instance
            ``temperature=0.8, top_p=[0.9, 1.0]`` (default: temperature 1).
        verifier: a name in `jspec.verifiers.VERIFIERS`, or a verifier of one's own; static.
        chunk: prompt tokens a prefill pass; static.
        logprobs: keep those of the emitted tokens; static.
        skip_empty_rounds: a round in which no row drafts costs a pass of one row; False: every
            pass has as many rows, and rounds alike; static.
        decide: what turns logits into a verdict: plain code, or the kernels that
            `jspec.pallas.select.select` picks for a device; static.
        **sampling: settings of `jspec.sampling.policy.make`, one number or one for each row.

    Returns:
        `Samples`, whose arrays have B rows of ``max_new_tokens`` slots.

    Raises:
        JspecError: settings out of range, a prompt that is empty or longer than the target's
            context, an unknown verifier, one that does not fit the drafter, or "greedy" above
            temperature 0; of traced values only the shapes can be checked.

    >>> import jspec.models.table as table
    >>> logits = jnp.log(jnp.array([[.1, .9], [.8, .2], [.5, .5]]))
    >>> samples = speculative_sample(
    ...     logits, jnp.array([[0], [1]]), target=table.make(2), key=[5, 6], max_new_tokens=4, temperature=0
    ... )
    >>> samples.tokens.tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1]]
    """
    decoder = make_decoder(
        target,
        none() if drafter is None else drafter,
        verifier,
        chunk=chunk,
        logprobs=logprobs,
        skip_empty_rounds=skip_empty_rounds,
        decide=decide,
    )
    request = make_request(
        decoder,
        prompt_tokens,
        key=key,
        prompt_length=prompt_length,
        max_new_tokens=max_new_tokens,
        max_new_tokens_per_row=max_new_tokens_per_row,
        stop_token_ids=stop_token_ids,
        policy=policy,
        **sampling,
    )
    check_greedy(decoder.verifier, request.policy.temperature)
    # Tokens have no gradient; and a program that is differentiated could not give its buffers away.
    params, draft_params = jax.lax.stop_gradient((params, draft_params))
    state = decoder.run(params, draft_params, decoder.init(params, draft_params, request))
    return _samples(state, max_new_tokens)


def make_request(
    decoder: Decoder,
    prompt_tokens: ArrayLike,
    *,
    key: ArrayLike,
    prompt_length: ArrayLike | None = None,
    max_new_tokens: int = 128,
    max_new_tokens_per_row: ArrayLike | None = None,
    stop_token_ids: ArrayLike | None = None,
    policy: Policy | None = None,
    min_slots: int = 0,
    slots_multiple: int = 64,
    **sampling: Any,
) -> Request:
    """Lay out prompts and settings as a `Request` for a decoder, and check what is concrete.

    Args:
        decoder: what `jspec.make_decoder` gave: it says how many slots a pass needs.
        prompt_tokens: Int[B, prompt], or a list of prompts, as in `speculative_sample`.
        key, prompt_length, max_new_tokens, max_new_tokens_per_row, stop_token_ids, policy: the same.
        min_slots: at least so many, where several requests are to share a program.
        slots_multiple: the slots are rounded up to a multiple of it, so that requests of similar
            size share a program.
        **sampling: the same.

    Returns:
        A `Request` of B rows, whose ``tokens`` have room for the prompts, the new tokens and a pass.

    Raises:
        JspecError: as `speculative_sample`.

    >>> from jspec import drafters
    >>> from jspec.models import table
    >>> decoder = make_decoder(table.make(9), drafters.none(), chunk=4)
    >>> request = make_request(decoder, [[1, 2, 3], [4]], key=[0, 1], max_new_tokens=5)
    >>> request.length.tolist(), request.max_length.tolist(), request.tokens.shape
    ([3, 1], [8, 6], (2, 64))
    """
    positive("max_new_tokens", max_new_tokens)
    tokens, ragged_length = _prompts(prompt_tokens)
    batch, width = tokens.shape
    if ragged_length is not None and prompt_length is not None:
        raise JspecError("prompt_length is for an array of prompts: a list of prompts has lengths of its own")
    given = ragged_length if prompt_length is None else prompt_length
    length = _per_row("prompt_length", np.full(batch, width) if given is None else given, batch)
    _check_length(length, width, decoder.context_length)
    room = _per_row(
        "max_new_tokens_per_row",
        np.full(batch, decoder.context_length) if max_new_tokens_per_row is None else max_new_tokens_per_row,
        batch,
    )
    if isinstance(room, np.ndarray) and (room < 0).any():
        raise JspecError(
            f"max_new_tokens_per_row is {room.min()} for row {room.argmin()}; it must be 0 or more"
        )
    minimum = np.minimum if isinstance(room, np.ndarray) else jnp.minimum
    room = minimum(room, min(max_new_tokens, decoder.context_length))
    if policy is not None and sampling:
        raise JspecError(f"give either a policy or its settings, not both: {', '.join(sampling)}")
    rows = policies.make(batch, decoder.vocab_size, **sampling) if policy is None else policy
    _check_policy(rows, batch, decoder.vocab_size)
    # By the width and not by the lengths, so that they never compile anew.
    new_tokens = min(max_new_tokens, max(decoder.context_length - width, 0))
    slots = dense.capacity(width, new_tokens, decoder.nodes, decoder.chunk, slots_multiple)
    slots = max(slots, min_slots)
    pad = np.pad if isinstance(tokens, np.ndarray) else jnp.pad
    return Request(
        tokens=jnp.asarray(pad(tokens, ((0, 0), (0, slots - width))), jnp.int32),
        length=jnp.asarray(length, jnp.int32),
        max_length=jnp.asarray(length + room, jnp.int32),
        stop_token_ids=jnp.asarray(_stop_table(stop_token_ids, batch), jnp.int32),
        policy=rows,
        key=keys.row_keys(key, batch),
    )


def _prompts(prompts: Any) -> tuple[np.ndarray | Array, np.ndarray | None]:
    """Token ids [B, width], and the lengths of a list of prompts."""
    if isinstance(prompts, jax.Array | np.ndarray):
        if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer) or 0 in prompts.shape:
            raise JspecError(
                f"prompt_tokens is {prompts.dtype}{list(prompts.shape)}; it must hold integers [B, prompt], "
                "neither of them 0"
            )
        return prompts, None
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
        raise JspecError(
            f"prompt_tokens is {prompts!r}; it must be an array [B, prompt] or a list of prompts"
        )
    for row, prompt in enumerate(prompts):
        if np.ndim(prompt) != 1 or not len(prompt) or np.asarray(prompt).dtype.kind not in "iu":
            raise JspecError(f"prompt {row} is {prompt!r}; it must hold token ids, at least one")
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), length.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, length


def _concrete(value: Any) -> Any:
    """On the host where it is known, so that nothing compiles for it; a traced value as it is."""
    return value if isinstance(value, jax.core.Tracer) else np.asarray(value)


def _per_row(name: str, value: ArrayLike, batch: int) -> Any:
    """One integer a row."""
    column = _concrete(value)
    if column.shape != (batch,) or not jnp.issubdtype(column.dtype, jnp.integer):
        raise JspecError(
            f"{name} is {column.dtype}{list(column.shape)}; it must be one integer for each of {batch} rows"
        )
    return column.astype(np.int32)


def _check_length(length: Any, width: int, context: int) -> None:
    """Raise for a prompt that is empty, longer than the array, or leaves no room in the context."""
    if isinstance(length, jax.core.Tracer):
        return
    if (length < 1).any() or (length > width).any():
        row = int(np.argmax((length < 1) | (length > width)))
        raise JspecError(f"prompt_length is {length[row]} for row {row}; it must be from 1 to {width}")
    if (length >= context).any():
        row = int(np.argmax(length))
        raise JspecError(f"prompt {row} has {length[row]} tokens; the target's context holds {context}")


def _check_policy(policy: Policy, batch: int, vocab: int) -> None:
    for name, value in zip(policy._fields, policy, strict=True):
        wanted = (batch, vocab) if name == "bias" else (batch,)
        if np.shape(value) != wanted:
            raise JspecError(
                f"policy.{name} has the shape {list(np.shape(value))}; it must be {list(wanted)}: "
                f"jspec.sampling.policy.make({batch}, {vocab}, ...)"
            )


def _stop_table(ids: Any, batch: int) -> Any:
    """Stop token ids of each row, [B, Q]."""
    if ids is None:
        return np.full((batch, 1), -1)
    table = _concrete(ids)
    if table.ndim == 1 and table.size:
        table = (np if isinstance(table, np.ndarray) else jnp).broadcast_to(table, (batch, table.size))
    if table.ndim != 2 or table.shape[0] != batch or not jnp.issubdtype(table.dtype, jnp.integer):
        raise JspecError(
            f"stop_token_ids is {table.dtype}{list(table.shape)}; it must hold token ids, [{batch}, Q] or [Q]"
        )
    return table


def _samples(state: State, max_new_tokens: int) -> Samples:
    """Cut the new tokens out of the buffers."""
    index = jnp.arange(max_new_tokens)
    length = state.length - state.prompt_length

    def new(values: Array) -> Array:
        rows = jnp.take_along_axis(values, state.prompt_length[:, None] + index, axis=1)
        return jnp.where(index < length[:, None], rows, 0)

    logprobs = None if state.logprobs is None else Logprobs(*map(new, state.logprobs))
    return Samples(new(state.tokens), length, state.finish, state.stats, logprobs)
