"""Sampling settings: checked on the host, and laid out as a `jspec.types.Policy`.

What they do to logits is `jspec.sampling.distribution`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.errors import JspecError
from jspec.types import Policy

_LARGEST = np.finfo(np.float32).max


class Setting(NamedTuple):
    """A number a row: its neutral value, which values are allowed, and what they mean."""

    neutral: float
    is_allowed: Callable[[np.ndarray], np.ndarray]
    allowed: str
    help: str
    count: bool = False  # type: ignore[assignment]  # a whole number


def _count(help: str) -> Setting:
    def is_allowed(v: np.ndarray) -> np.ndarray:
        allowed: np.ndarray = (v >= 0) & (v <= _LARGEST) & (v == np.floor(v))
        return allowed

    return Setting(0, is_allowed, "an integer, 0 (off) or more", help, count=True)


def _finite(help: str) -> Setting:
    return Setting(0.0, lambda v: np.abs(v) <= _LARGEST, "finite (0: off)", help)


SETTINGS: dict[str, Setting] = {
    "temperature": Setting(
        1.0, lambda v: (v >= 0) & (v <= _LARGEST), "finite and 0 (greedy) or more", "0 is greedy."
    ),
    "top_k": _count("0 is off."),
    "top_p": Setting(1.0, lambda v: (v > 0) & (v <= 1), "more than 0 and at most 1 (off)", "1 is off."),
    "min_p": Setting(0.0, lambda v: (v >= 0) & (v <= 1), "from 0 (off) to 1", "0 is off."),
    "repetition_penalty": Setting(
        1.0,
        lambda v: (v > 0) & (v <= _LARGEST),
        "finite and more than 0 (1: off)",
        "Prompt and answer; 1 is off.",
    ),
    "presence_penalty": _finite("Answer only; 0 is off."),
    "frequency_penalty": _finite("Answer only; 0 is off."),
    "min_new_tokens": _count("No stop token before so many."),
}
"""The fields of `Policy` that are one number a row. The command's options are made from it."""

BIASES = ("logit_bias", "allowed", "banned")
"""Settings that together make the field ``bias``; -inf last."""

NEUTRAL: dict[str, float] = {"bias": 0.0}
"""Fields that are no `SETTINGS`, and the value that changes nothing."""


def neutral(field: str) -> float:
    """The value of a field of `Policy` that changes nothing."""
    return SETTINGS[field].neutral if field in SETTINGS else NEUTRAL[field]


def make(batch: int, vocab_size: int, **settings: Any) -> Policy:
    """Check settings on the host and lay them out, B rows of them; the defaults change nothing.

    Args:
        batch: B.
        vocab_size: V.
        **settings: numbers of `SETTINGS` (temperature, top_k, top_p, min_p, repetition_penalty,
            presence_penalty, frequency_penalty, min_new_tokens), one for all rows or a
            sequence of B; and ``logit_bias``, a dict {token id: bias}, ``allowed`` (None: all)
            and ``banned``, token ids, or a sequence of B of any of these.

    Raises:
        JspecError: an unknown setting, or one out of range: its name, its value and what is allowed.

    >>> make(2, 50, temperature=[0, 0.8], top_p=0.9, banned=[3]).temperature.tolist()
    [0.0, 0.8]
    >>> make(1, 50, top_p=0)
    Traceback (most recent call last):
    jspec.errors.JspecError: top_p is 0; it must be more than 0 and at most 1 (off)
    """
    _check_names(settings)
    columns = {
        name: _column(name, setting, settings.get(name, setting.neutral), batch)
        for name, setting in SETTINGS.items()
    }
    bias = np.zeros((batch, vocab_size))
    for name in BIASES:
        for entry, row in zip(_entries(name, settings.get(name), batch), bias, strict=True):
            if entry is not None:
                _write(name, entry, row)
    for index in np.flatnonzero(np.all(np.isneginf(bias), axis=1)):
        raise JspecError(f"row {index}: logit_bias, allowed and banned mask all {vocab_size} tokens")
    return Policy(**{name: jnp.asarray(column) for name, column in columns.items()}, bias=jnp.asarray(bias))


def greedy(batch: int, vocab_size: int) -> Policy:
    """B rows that always take the likeliest token, nothing else changed."""
    return make(batch, vocab_size, temperature=0.0)


def _check_names(settings: Collection[str]) -> None:
    """Raise for a setting that is not there; the nearest name is told."""
    known = (*SETTINGS, *BIASES)
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            rather = f"; did you mean {near[0]!r}?" if near else f": the settings are {', '.join(known)}"
            raise JspecError(f"unknown sampling setting {name!r}{rather}")


def _column(name: str, setting: Setting, value: Any, batch: int) -> np.ndarray:
    """One number a row, in range."""
    if np.shape(value) not in ((), (batch,)):
        raise JspecError(f"{name} is {value!r}; it must be one number, or one for each of {batch} rows")
    column: np.ndarray = np.broadcast_to(value, (batch,))
    if column.dtype.kind not in "iuf":
        raise JspecError(f"{name} is {value!r}; it must be a number, {setting.allowed}")
    for bad in column[~setting.is_allowed(column)]:
        raise JspecError(f"{name} is {bad}; it must be {setting.allowed}")
    if setting.count:
        column = np.minimum(column, np.iinfo(np.int32).max)
        return column.astype(np.int32)
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
