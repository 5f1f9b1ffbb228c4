"""The conformance list: every drafter, and how little it may accept.

One line a drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jspec import shapes
from jspec.sampling.drafters import eagle
from jspec.sampling.drafters.medusa import medusa
from jspec.sampling.drafters.model import model as draft_model
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.types import Drafter, Model, Params
from tests import oracle
from tests.sampling.drafters import rigged


@dataclass(frozen=True)
class Case:
    """``make``: the drafter and its params for a target and its params.

    ``cycle_floor``: the acceptance rate on a text of period 5, seen twice, where a draft
    model is the target itself and a head copies it. ``head``: the kind, whose taps the target needs.
    """

    name: str
    make: Callable[[Model, Params], tuple[Drafter, Params]]
    cycle_floor: float
    head: str = ""

    @property
    def taps(self) -> tuple[int, ...]:
        return rigged.TAPS[self.head] if self.head else ()


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


def headed(name: str, kind: str, build: Callable[..., Drafter], **options) -> Case:
    """A drafter with a random head, and one that copies the target for the cycle."""

    def make(target: Model, params: Params) -> tuple[Drafter, Params]:
        copies = target.vocab_size == rigged.VOCAB
        head, own = rigged.copying(kind) if copies else rigged.random(kind, params)
        return build(head, vocab_size=target.vocab_size, **options), own

    return Case(name, make, 1.0, kind)


CHAIN = shapes.chain(3)
BUSHY = shapes.shape([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])
BEST = dict(size=7, depth=3, topk=4)

CASES = [
    Case("none", lambda *_: (none(), None), 0.0),
    Case("ngram", lambda *_: (ngram(4, min_ngram=2), None), 1.0),
    Case("ngram_k1", lambda *_: (ngram(1, min_ngram=1, max_ngram=1), None), 1.0),
    Case("ngram_frequent", lambda *_: (ngram(3, min_ngram=1, match="most_frequent"), None), 1.0),
    Case("model", other_llama(3), 1.0),
    Case("model_k1", other_llama(1), 1.0),
    Case("model_greedy", other_llama(3, greedy=True), 1.0),
    headed("eagle_chain", "eagle", eagle.fixed, shape=CHAIN),
    headed("eagle_tree", "eagle", eagle.fixed, shape=BUSHY),
    headed("eagle_greedy_chain", "eagle", eagle.fixed, shape=CHAIN, drawn=False),
    headed("eagle2", "eagle", eagle.best_first, **BEST),
    headed("eagle3_chain", "eagle3", eagle.fixed, shape=CHAIN),
    headed("eagle3_best_first", "eagle3", eagle.best_first, **BEST),
    headed("medusa_tree", "medusa", medusa, shape=BUSHY),
]
