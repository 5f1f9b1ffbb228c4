"""The conformance list: every drafter, and how little it may accept.

One line a drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jspec.sampling.drafters.model import model as draft_model
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.types import Drafter, Model, Params
from tests import oracle


@dataclass(frozen=True)
class Case:
    """``make``: the drafter and its params for a target and its params.

    ``cycle_floor``: the acceptance rate on a text of period 5, seen twice, where a draft
    model is the target itself.
    """

    name: str
    make: Callable[[Model, Params], tuple[Drafter, Params]]
    cycle_floor: float


def other_llama(k: int, **options) -> Callable[[Model, Params], tuple[Drafter, Params]]:
    """A draft model with the target's shapes and other weights; the target's own for the cycle."""

    def make(target: Model, params: Params) -> tuple[Drafter, Params]:
        for tiny in oracle.TINY.values():
            if target is tiny()[0]:
                draft, other = tiny(seed=1)
                mixed = jax.tree.map(lambda a, b: a + 0.3 * (b - a), params, other)
                return draft_model(draft, k, **options), mixed
        return draft_model(target, k, **options), params

    return make


CASES = [
    Case("none", lambda *_: (none(), None), 0.0),
    Case("ngram", lambda *_: (ngram(4, min_ngram=2), None), 1.0),
    Case("ngram_k1", lambda *_: (ngram(1, min_ngram=1, max_ngram=1), None), 1.0),
    Case("ngram_frequent", lambda *_: (ngram(3, min_ngram=1, match="most_frequent"), None), 1.0),
    Case("model", other_llama(3), 1.0),
    Case("model_k1", other_llama(1), 1.0),
    Case("model_greedy", other_llama(3, greedy=True), 1.0),
]
