"""The conformance list: every drafter, and how little it may accept.

One line a drafter. ``cycle_floor``: the acceptance rate it must reach on a text of
period 5 that it has seen twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.types import Drafter


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Drafter]
    cycle_floor: float


CASES = [
    Case("none", none, 0.0),
    Case("ngram", lambda: ngram(4, min_ngram=2), 1.0),
    Case("ngram_k1", lambda: ngram(1, min_ngram=1, max_ngram=1), 1.0),
    Case("ngram_frequent", lambda: ngram(3, min_ngram=1, match="most_frequent"), 1.0),
]
