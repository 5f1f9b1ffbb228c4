"""Every wrong value in every field of a config.json: what the readers are put through."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from jspec.errors import JspecError
from jspec.models.config import Reader

ABSENT = object()
NAN, INF = math.nan, math.inf  # json.loads makes them of NaN, Infinity and 1e400
VALUES = ["two", "", None, [], {}, True, -1, 0, 1.5, INF, -INF, NAN, 2**40, 10**400, 1e-300, [None], ["two"]]

TEXTS, LISTS = ["two", ""], [[], [None], ["two"]]
NO_NUMBER = [*TEXTS, *LISTS, {}, True, INF, -INF, NAN, -1, 10**400]
NO_OBJECT = [*TEXTS, *LISTS, True, -1, 0, 1.5, INF, NAN, 2**40]
REFUSED: dict[str, list[Any]] = {
    "integer": [*NO_NUMBER, 1.5, 2**40, 1e-300],
    "number": [*NO_NUMBER, 0, 1e-300],
    "flag": [*TEXTS, *LISTS, {}, -1, 0, 1.5, INF, NAN, 2**40],
    "text": ["", *LISTS, {}, True, -1, 0, 1.5, INF, NAN, 2**40],
    "numbers": [*NO_OBJECT, {}, [NAN] * 10, [True] * 10, [0.0] * 10, [1.0] * 3],
    "integers": [*TEXTS, {}, True, -1, 1.5, NAN, 2**40, [None], ["two"], [True], [-1], [1.5]],
    "nested": NO_OBJECT,
}
"""How a field is read (a method of `Reader`) -> the values that it must refuse."""


def fields(
    monkeypatch: Any, read: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]
) -> dict[str, set]:
    """The fields that ``read`` takes from a config, present or not, each with how it is read."""
    found: dict[str, set] = defaultdict(set)

    def recording(name: str, original: Callable) -> Callable:
        def method(self: Reader, key: str, *arguments: Any, **options: Any) -> Any:
            found[self.place + key].add(name)
            return original(self, key, *arguments, **options)

        return method

    with monkeypatch.context() as patch:
        for name in REFUSED:
            patch.setattr(Reader, name, recording(name, getattr(Reader, name)))
        outcome(read, config)
    return found


def changed(config: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The config with another value at a place such as ``rope_scaling.factor``."""
    key, _, rest = field.partition(".")
    if value is ABSENT and not rest:
        return {name: one for name, one in config.items() if name != key}
    inner = config.get(key)
    new = changed(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value
    return {**config, key: new}


def outcome(read: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]) -> Any:
    """What reading gives: a model, or a `JspecError`; any other exception passes through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read(dict(config))
        except JspecError as error:
            return error


def check(monkeypatch: Any, read: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]) -> int:
    """Put every value into every field. Gives how many fields there are."""
    whole = outcome(read, config)
    assert not isinstance(whole, JspecError), whole
    ways = fields(monkeypatch, read, config)
    for field in sorted({*ways, *config}):
        refused = [value for way in ways.get(field, ()) for value in REFUSED[way]]
        for value in [ABSENT, *VALUES, *refused]:
            result = outcome(read, changed(config, field, value))
            if isinstance(result, JspecError):
                assert "\n" not in str(result) and len(str(result)) < 500, (field, value, result)
            else:
                assert not any(value is one for one in refused), f"{field} = {value!r} was taken"
    return len(ways)
