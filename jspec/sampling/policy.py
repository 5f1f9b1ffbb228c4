"""The target law: from logits to the log-probabilities that text is drawn from.

There is one law, `apply`, for plain decoding, drafting, verifying and the bonus token.
It gives a distribution; drawing is the caller's. Every setting is a traced array with
one entry a row, so requests mix in one batch and one compiled program serves them all;
a part that no row uses is skipped at run time.

The order is that of transformers (``generation/utils.py``, ``_get_logits_processor``):

1. ``bias``: logit bias, allowed and banned tokens;
2. repetition penalty (Keskar et al. 2019; prompt and generated tokens): positive logits
   are divided by it, others multiplied, the bias included;
3. frequency and presence penalty (OpenAI's, as in vLLM; generated tokens only);
4. stop tokens are banned until ``min_new_tokens`` are written;
5. temperature; 0 ends here: all mass on the greatest logit, the lowest id in a tie;
6. top-k, 7. top-p (of the law that top-k left, renormalised), 8. min-p.

top-k and top-p cut at a threshold, so **ties stay**: ``top_k=2`` with three equal greatest
logits keeps three. The threshold is exact and found without sorting, one bit a pass, for
order among floats is order among their bits.

A row is an error if its logits hold NaN or +inf or if nothing is left: it comes out all
NaN or all -inf, so that its greatest value is not finite; no step may hide that. -inf in
logits, as of a padded vocabulary, is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.errors import JspecError
from jspec.sampling import truncate
from jspec.sampling.truncate import any_of, each
from jspec.types import Tree


class Policy(NamedTuple):
    """Sampling settings, one entry a row, all traced. Make one with `make` or `greedy`."""

    temperature: Float[Array, "B"]  # 0: greedy
    top_k: Int[Array, "B"]  # 0: off
    top_p: Float[Array, "B"]  # 1: off
    min_p: Float[Array, "B"]  # 0: off
    repetition_penalty: Float[Array, "B"]  # 1: off; prompt and generated tokens
    presence_penalty: Float[Array, "B"]  # 0: off; generated tokens only
    frequency_penalty: Float[Array, "B"]  # 0: off; generated tokens only
    min_new_tokens: Int[Array, "B"]  # no stop token before so many others
    bias: Float[Array, "B V"]  # added to the logits; -inf: never


class History(NamedTuple):
    """The text of each row so far; slots of ``tokens`` at and after ``length`` mean nothing."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    stop: Int[Array, "B Q"]  # token ids that end a row; -1 fills the table


def apply(
    policy: Policy, history: History, nodes: Int[Array, "B R"], tree: Tree, logits: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """The law of the token after each node: normalised log-probabilities, -inf where excluded.

    ``nodes`` are token ids; node 0, the root, is the last token of the history. What
    comes before node i's successor is the history, then i's ancestors below the root, then
    i itself. Of a tree of R nodes the law may be asked at N of them: mask [B, N, R].
    float64 logits give float64, all others float32. Everything is traced but shapes and
    whether the tree is a chain. Raises nothing: see the NaN rule above.

    >>> from jspec import tree
    >>> history = History(jnp.array([[2, 0]]), jnp.array([1]), jnp.array([1]), jnp.array([[-1]]))
    >>> logits = jnp.log(jnp.array([[[.4, .1, .5]]]))
    >>> jnp.exp(apply(make(1, 3, top_k=2), history, jnp.array([[2]]), tree.chain(1, 1), logits)).tolist()
    [[[0.444, 0.0, 0.556]]]
    """
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    policy = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, policy)
    x = logits.astype(dtype)
    x = jax.lax.cond(
        is_adjusted(policy, history, tree), lambda x: adjust(policy, history, nodes, tree, x), lambda x: x, x
    )
    top = truncate.greatest(x)
    sampled = policy.temperature > 0

    def mix(law):
        return jnp.where(each(sampled), law, truncate.greedy(x, top))

    def warm():
        return jax.lax.cond(any_of(~sampled), mix, lambda law: law, truncate.sampled(policy, x, top))

    return jax.lax.cond(any_of(sampled), warm, lambda: truncate.greedy(x, top))  # all greedy: no exp


def is_adjusted(policy: Policy, history: History, tree: Tree) -> Bool[Array, ""]:
    """Whether `adjust` changes any logit of this round."""
    return any_of(policy.bias, _penalised(policy), _early(policy, history, tree))


def adjust(
    policy: Policy, history: History, nodes: Int[Array, "B R"], tree: Tree, x: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """Bias, penalties and the ban on early stops, steps 1 to 4. Each adds, for `where` might hide a NaN."""
    row = jnp.arange(x.shape[0])[:, None]
    x = x + policy.bias[:, None, :].astype(x.dtype)
    x = jax.lax.cond(_penalised(policy), lambda x: _penalise(policy, history, nodes, tree, x), lambda x: x, x)
    stop = jnp.where(history.stop >= 0, history.stop, x.shape[-1])  # no wrapping around
    ban = jnp.zeros((x.shape[0], x.shape[-1]), x.dtype).at[row, stop].set(-jnp.inf, mode="drop")
    return x + jnp.where(_early(policy, history, tree)[:, :, None], ban[:, None, :], 0)


def _penalised(policy: Policy) -> Bool[Array, ""]:
    return any_of(policy.presence_penalty, policy.frequency_penalty, policy.repetition_penalty != 1)


def _early(policy: Policy, history: History, tree: Tree) -> Bool[Array, "B N"]:
    """Where no stop token may follow yet."""
    generated = (history.length - history.prompt_length)[:, None] + tree.depth
    return generated < policy.min_new_tokens[:, None]


def _penalise(policy: Policy, history: History, nodes: Array, tree: Tree, x: Array) -> Array:
    """Repetition, frequency and presence penalties, from counts of each node's own text."""
    batch, count, vocab = x.shape
    row = jnp.arange(batch)[:, None]
    slot = jnp.arange(history.tokens.shape[1])
    tokens = jnp.where(slot < history.length[:, None], history.tokens, vocab)  # beyond V: dropped
    written = (slot >= history.prompt_length[:, None]).astype(jnp.int32)
    counts = jnp.zeros((batch, 2, vocab), x.dtype).at[row, written, tokens].add(1, mode="drop")
    index = jnp.arange(nodes.shape[1])
    above = index[:, None] >= index if tree.mask is None else tree.mask
    above = jnp.broadcast_to(above & (index > 0), (batch, count, len(index)))  # the history has the root
    generated = jnp.broadcast_to(counts[:, 1:], x.shape)
    at = row[:, :, None], jnp.arange(count)[:, None], nodes[:, None, :]
    generated = generated.at[at].add(above, mode="drop")
    seen = (counts[:, :1] > 0) | (generated > 0)
    penalty = each(policy.repetition_penalty)
    x = jnp.where(seen, jnp.where(x < 0, x * penalty, x / penalty), x)
    x -= each(policy.frequency_penalty) * generated
    return x - each(policy.presence_penalty) * (generated > 0)


_LARGEST = np.finfo(np.float32).max
_COUNT = (lambda v: (v >= 0) & (v <= _LARGEST) & (v == np.floor(v)), "an integer, 0 (off) or more")
_RANGES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "temperature": (lambda v: (v >= 0) & (v <= _LARGEST), "finite and 0 (greedy) or more"),
    "top_k": _COUNT,
    "top_p": (lambda v: (v > 0) & (v <= 1), "more than 0 and at most 1 (off)"),
    "min_p": (lambda v: (v >= 0) & (v <= 1), "from 0 (off) to 1"),
    "repetition_penalty": (lambda v: (v > 0) & (v <= _LARGEST), "finite and more than 0 (1: off)"),
    "presence_penalty": (lambda v: np.abs(v) <= _LARGEST, "finite (0: off)"),
    "frequency_penalty": (lambda v: np.abs(v) <= _LARGEST, "finite (0: off)"),
    "min_new_tokens": _COUNT,
}


def make(
    batch: int,
    vocab_size: int,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    min_new_tokens: Any = 0,
    logit_bias: Any = None,
    allowed: Any = None,
    banned: Any = (),
) -> Policy:
    """Check settings on the host and lay them out, B rows of them; the defaults change nothing.

    Numbers are one for all rows or a sequence of B. ``logit_bias`` is a dict {token id:
    bias}, ``allowed`` (None: all) and ``banned`` are token ids, or each is a sequence of
    B such. `JspecError` names the setting, its value and the allowed range.

    >>> make(2, 50, temperature=[0, 0.8], top_p=0.9, banned=[3]).temperature.tolist()
    [0.0, 0.8]
    >>> make(1, 50, top_p=0)
    Traceback (most recent call last):
    jspec.errors.JspecError: top_p is 0; it must be more than 0 and at most 1 (off)
    """
    given = locals()
    columns = {name: _column(name, given[name], batch) for name in _RANGES}
    bias = np.zeros((batch, vocab_size))
    for name in ("logit_bias", "allowed", "banned"):  # -inf last
        for entry, row in zip(_entries(name, given[name], batch), bias, strict=True):
            if entry is not None:
                _write(name, entry, row)
    for index in np.flatnonzero(np.all(np.isneginf(bias), axis=1)):
        raise JspecError(f"row {index}: logit_bias, allowed and banned mask all {vocab_size} tokens")
    return Policy(**{name: jnp.asarray(column) for name, column in columns.items()}, bias=jnp.asarray(bias))


def greedy(batch: int, vocab_size: int) -> Policy:
    """B rows that always take the likeliest token, nothing else changed."""
    return make(batch, vocab_size, temperature=0.0)


def _column(name: str, value: Any, batch: int) -> np.ndarray:
    """One number a row, in range."""
    inside, allowed = _RANGES[name]
    if np.shape(value) not in ((), (batch,)):
        raise JspecError(f"{name} is {value!r}; it must be one number, or one for each of {batch} rows")
    column = np.broadcast_to(value, (batch,))
    if column.dtype.kind not in "iuf":
        raise JspecError(f"{name} is {value!r}; it must be a number, {allowed}")
    for bad in column[~inside(column)]:
        raise JspecError(f"{name} is {bad}; it must be {allowed}")
    if _RANGES[name] is _COUNT:
        return np.minimum(column, np.iinfo(np.int32).max).astype(np.int32)
    return column.astype(np.float64)  # jax makes it float32, unless 64 bits are enabled


def _entries(name: str, value: Any, batch: int) -> list[Any]:
    """``logit_bias``, ``allowed`` or ``banned`` as one entry for each row."""
    several = isinstance(value, Collection) and not isinstance(value, dict)
    if not several or not any(entry is None or isinstance(entry, Collection) for entry in value):
        return [value] * batch
    if len(value) != batch:
        raise JspecError(f"{name} has {len(value)} entries; it must have one for each of {batch} rows")
    return list(value)


def _write(name: str, entry: Any, bias: np.ndarray) -> None:
    """Put one row's entry into its bias, in place."""
    if not isinstance(entry, Collection) or (name == "logit_bias") != isinstance(entry, dict):
        raise JspecError(f"{name} is {entry!r}; it must hold token ids (logit_bias: {{id: bias}})")
    for token in entry:
        if not isinstance(token, int | np.integer) or not 0 <= token < len(bias):
            raise JspecError(f"{name} names token {token!r}; it must be an integer from 0 to {len(bias) - 1}")
    if name == "banned":
        bias[list(entry)] = -np.inf
    elif name == "allowed":
        bias[np.setdiff1d(np.arange(len(bias)), list(entry))] = -np.inf
    else:
        for token, value in dict(entry).items():
            number = isinstance(value, int | float | np.floating)
            if not number or not (value == -np.inf or abs(value) <= _LARGEST):
                raise JspecError(f"logit_bias of token {token} is {value!r}; it must be finite or -inf")
            bias[token] = value
