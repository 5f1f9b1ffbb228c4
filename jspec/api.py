"""`speculative_sample`: the functional front door. Arrays in, arrays out, params an argument.

It may be called as it is, under `jit`, or inside a larger program such as an RL step:
params and prompts are traced, so new weights never compile again. Decoders are kept by
their settings, since a record of functions is a new one each time it is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import cache as kv
from jspec import decode
from jspec.errors import JspecError
from jspec.sampling import keys, lossy, verify, walk
from jspec.sampling import policy as target_law
from jspec.sampling.drafters.none import none
from jspec.sampling.verify import Verifier
from jspec.types import Drafter, Logprobs, Model, Params, Request, State, Stats, Verdict

VERIFIERS = {
    rule.name: rule for rule in (verify.token, verify.block, verify.coupled, verify.greedy, lossy.typical)
}
"""``verifier=`` -> the rule."""


def find_verifier(name: str) -> Verifier:
    """The rule of a name; `JspecError` if there is none."""
    if name not in VERIFIERS:
        raise JspecError(f"unknown verifier {name!r}: choose one of {', '.join(VERIFIERS)}")
    return VERIFIERS[name]


class Samples(NamedTuple):
    """What was written. ``tokens`` and ``logprobs`` beyond a row's ``length`` are 0."""

    tokens: Int[Array, "B max_new_tokens"]
    length: Int[Array, "B"]  # new tokens, a stop token included
    finish: Int[Array, "B"]  # jspec.types: STOP, LENGTH or ERROR
    stats: Stats
    logprobs: Logprobs | None


@functools.lru_cache(maxsize=64)
def decoder(
    target: Model,
    drafter: Drafter,
    verifier: str | Verifier = "token",
    *,
    chunk: int = 64,
    logprobs: bool = False,
    narrow: bool = True,
    decide: Callable[..., Verdict] = walk.decide,
) -> decode.Decoder:
    """`jspec.make_decoder` of a rule, or of its name, built once for each set of arguments.

    Raises `JspecError` for an unknown rule, or one that does not fit the drafter.
    """
    rule = find_verifier(verifier) if isinstance(verifier, str) else verifier
    options: dict[str, Any] = dict(chunk=chunk, logprobs=logprobs, narrow=narrow, decide=decide)
    return decode.make_decoder(target, drafter, rule, **options)


def speculative_sample(
    params: Params,
    prompt_tokens: Int[Array, "B prompt"],
    *,
    target: Model,
    key: Array | Sequence[int],
    drafter: Drafter | None = None,
    draft_params: Params = None,
    prompt_length: Int[Array, "B"] | None = None,
    max_new_tokens: int = 128,
    limit: Int[Array, "B"] | None = None,
    stop: Int[Array, "B Q"] | None = None,
    policy: target_law.Policy | None = None,
    verifier: str | Verifier = "token",
    chunk: int = 64,
    logprobs: bool = False,
    narrow: bool = True,
    decide: Callable[..., Verdict] = walk.decide,
    **sampling: Any,
) -> Samples:
    """Draw a continuation of each prompt from exactly the target's law.

    Args:
        params: the target's; traced.
        prompt_tokens: ids, padded on the right; traced.
        target: the target model; static.
        key: one `jax.random.key`, traced or not, or a seed for each row. A row's text
            depends on its own key, prompt and settings only.
        drafter: static; default: plain decoding.
        draft_params: the drafter's params; traced.
        prompt_length: real tokens of each row, at least 1; default: all.
        max_new_tokens: static; the arrays have room for so many.
        limit: new tokens of each row, where rows differ; traced.
        stop: ids that end a row, -1 fills the table; traced.
        policy: rows of sampling settings, traced; or give the settings of
            `jspec.sampling.policy.make` as keyword arguments, for instance
            ``temperature=0.8, top_p=[0.9, 1.0]`` (default: temperature 1).
        verifier: a name in `VERIFIERS`, or a rule of one's own; static.
        chunk: prompt tokens a prefill pass; static.
        logprobs: keep those of the emitted tokens; static.
        narrow: a round in which no row drafts costs a pass of one row; False: every pass
            has as many rows, and rounds alike; static.
        decide: what turns logits into a verdict: plain code, or the kernels that
            `jspec.pallas.select.select` picks for a device; static.

    Raises:
        JspecError: settings out of range, a prompt longer than the target's context, an
            unknown verifier or one that does not fit the drafter.

    >>> import jspec.models.table as table
    >>> law = jnp.log(jnp.array([[.1, .9], [.8, .2], [.5, .5]]))
    >>> samples = speculative_sample(
    ...     law, jnp.array([[0], [1]]), target=table.make(2), key=[5, 6], max_new_tokens=4, temperature=0
    ... )
    >>> samples.tokens.tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1]]
    """
    batch, width = prompt_tokens.shape
    if not 0 < width < target.max_length:
        raise JspecError(
            f"prompts of {width} tokens; the target's context holds 1 to {target.max_length - 1}"
        )
    if max_new_tokens < 1:
        raise JspecError(f"max_new_tokens = {max_new_tokens} should be at least 1")
    if policy is not None and sampling:
        raise JspecError(f"give either a policy or its settings, not both: {', '.join(sampling)}")
    rows = policy if policy is not None else target_law.make(batch, target.vocab_size, **sampling)
    options: dict[str, Any] = dict(chunk=chunk, logprobs=logprobs, narrow=narrow, decide=decide)
    loop = decoder(target, drafter or none(), verifier, **options)
    slots = kv.capacity(width, max_new_tokens, loop.nodes, chunk)
    length = jnp.full((batch,), width) if prompt_length is None else jnp.asarray(prompt_length)
    room = jnp.full((batch,), max_new_tokens) if limit is None else jnp.minimum(limit, max_new_tokens)
    request = Request(
        tokens=jnp.pad(jnp.asarray(prompt_tokens, jnp.int32), ((0, 0), (0, slots - width))),
        length=length,
        limit=length + room,
        stop=jnp.full((batch, 1), -1) if stop is None else jnp.asarray(stop),
        policy=rows,
        key=keys.row_keys(key, batch),
    )
    state = loop.run(params, draft_params, loop.init(params, draft_params, request))
    return _samples(state, max_new_tokens)


def _samples(state: State, max_new_tokens: int) -> Samples:
    """Cut the new tokens out of the buffers."""
    index = jnp.arange(max_new_tokens)
    length = state.length - state.prompt_length

    def new(values: Array) -> Array:
        rows = jnp.take_along_axis(values, state.prompt_length[:, None] + index, axis=1)
        return jnp.where(index < length[:, None], rows, 0)

    logprobs = None if state.logprobs is None else Logprobs(*map(new, state.logprobs))
    return Samples(new(state.tokens), length, state.finish, state.stats, logprobs)
