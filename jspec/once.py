"""Builders that give the same object for equal arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_forget: list[Callable[[], None]] = []

P = ParamSpec("P")
T = TypeVar("T")


def built_once(build: Callable[P, T]) -> Callable[P, T]:
    """A decorator of builders of static values: equal arguments, defaults filled in, give one object.

    `Model`, `Drafter` and `Verifier` hash by identity, so a compiled program is found again
    only with the same object; this makes ``ngram(4)``, written twice, the same drafter. Lists
    count as tuples. Arguments that cannot be hashed build anew. The newest 64 are kept.

    Args:
        build: a function of static values only: arrays are no part of what it gives.

    >>> from jspec.types import Verifier
    >>> @built_once
    ... def never(name: str = "never") -> Verifier:
    ...     return Verifier(name, lambda drafts, logp: 0 * logp[:, 0], lambda drafts, logp, node: logp[node])
    >>> never() is never("never")
    True
    """
    signature = inspect.signature(build)

    @functools.lru_cache(maxsize=64)
    def cached(call: _Call) -> T:
        return build(*call.args, **call.kwargs)

    _forget.append(cached.cache_clear)

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _Call(tuple((name, _hashable(value)) for name, value in bound.arguments.items()), args, kwargs)
        try:
            hash(call)
        except TypeError:
            return build(*args, **kwargs)
        return cached(call)

    return built


class _Call:
    """The arguments of a call, equal if they mean the same."""

    def __init__(self, meaning: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.meaning, self.args, self.kwargs = meaning, args, kwargs

    def __hash__(self) -> int:
        return hash(self.meaning)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.meaning == other.meaning


def forget() -> None:
    """Drop everything that was built: what is asked for next is built, and compiled, anew."""
    for clear in _forget:
        clear()


def _hashable(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(map(_hashable, value))
    if type(value) is dict:
        return frozenset((name, _hashable(entry)) for name, entry in value.items())
    return value
