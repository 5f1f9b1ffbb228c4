"""The conformance list: every drafter, and how little it may accept. One line a drafter.

A drafter without params is taken from `jspec.drafters.BY_NAME` by itself. A line puts it through greedy
equality, ragged rows, stops and limits (`test_conformance.py`), a floor on acceptance, 64 bits, and
χ² of the whole loop at temperature (`tests/test_loop_distribution.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jspec import tree
from jspec.certify.tiny import tiny, tiny_head
from jspec.sampling.drafters import BY_NAME, draft_model, eagle_dynamic, eagle_static, medusa, ngram, none
from jspec.types import Drafter, Model, Params
from jspec.weights.heads import KINDS
from tests import oracle
from tests.sampling.drafters import rigged


class Rig(NamedTuple):
    """A target and a drafter for it, ready for `jspec.make_decoder`."""

    target: Model
    params: Params
    drafter: Drafter
    draft_params: Params


class World(NamedTuple):
    """Models of one kind: targets with the features asked for, a draft model, and heads by their kind."""

    target: Callable[[tuple[int, ...]], tuple[Model, Params]]
    draft: Callable[[], tuple[Model, Params]]
    head: Callable[[str], tuple[object, Params]]


def transformer(name: str) -> World:
    """A tiny transformer of the oracle's, whose greedy text is known; a draft with other weights."""
    make = oracle.TINY[name]

    def draft() -> tuple[Model, Params]:
        (_, params), (model, other) = make(), make(seed=1)
        return model, jax.tree.map(lambda a, b: a + 0.3 * (b - a), params, other)

    return World(lambda layers: make(feature_layers=layers) if layers else make(), draft, random_head(make))


def random_head(make: Callable) -> Callable[[str], tuple[object, Params]]:
    return lambda kind: rigged.random(kind, make()[1])


TRANSFORMERS = {name: transformer(name) for name in oracle.TINY}
CYCLE = World(  # a text of period 5, of which the draft and the heads know all
    lambda layers: rigged.target(layers) if layers else oracle.cycle_table(),
    oracle.cycle_table,
    rigged.copying,
)
HEAD_KINDS = {kind.name: kind for kind in KINDS}
FIVE_TOKENS = World(  # whose distribution is enumerated
    lambda layers: tiny(0) if not layers else None, lambda: tiny(1), lambda kind: tiny_head(HEAD_KINDS[kind])
)


@dataclass(frozen=True)
class Case:
    """``build``: the drafter, given a draft model or a head where it needs one, and the target's V.

    ``floor``: the acceptance rate on a text of period 5, seen twice, where a draft
    model is the target itself and a head copies it. ``model``, ``head``: what it drafts with.
    """

    name: str
    build: Callable[..., Drafter]
    floor: float = 1.0
    model: bool = False
    head: str = ""
    variant: bool = False  # of a drafter that is in the list already: its tests are slow ones

    def rig(self, world: World) -> Rig:
        if self.head and world is FIVE_TOKENS:
            target, params, head, own = world.head(self.head)
            return Rig(target, params, self.build(head, target.vocab_size), own)
        if self.head:
            target, params = world.target(rigged.FEATURE_LAYERS[self.head])
            head, own = world.head(self.head)
            return Rig(target, params, self.build(head, target.vocab_size), own)
        target, params = world.target(())
        if self.model:
            draft, own = world.draft()
            return Rig(target, params, self.build(draft, target.vocab_size), own)
        return Rig(target, params, self.build(), None)


BUSHY = tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])


def chain(head: object, vocab: int, **options) -> Drafter:
    return eagle_static(head, tree.chain_shape(3), vocab_size=vocab, **options)


def static(head: object, vocab: int) -> Drafter:
    return eagle_static(head, BUSHY, vocab_size=vocab)


def dynamic(head: object, vocab: int) -> Drafter:
    return eagle_dynamic(head, size=7, depth=3, topk=4, vocab_size=vocab)


CASES = [
    Case("none", none, floor=0.0),
    Case("ngram", lambda: ngram(4, min_ngram=1)),
    Case("ngram_k1", lambda: ngram(1, min_ngram=1, max_ngram=1), variant=True),
    Case("ngram_frequent", lambda: ngram(3, min_ngram=1, match="most_frequent"), variant=True),
    *(Case(name, lambda name=name: BY_NAME[name](3)) for name in BY_NAME if name not in ("none", "ngram")),
    Case("model", lambda draft, vocab: draft_model(draft, 3, vocab_size=vocab), model=True),
    Case("model_k1", lambda draft, vocab: draft_model(draft, 1, vocab_size=vocab), model=True, variant=True),
    Case("model_greedy", lambda draft, vocab: draft_model(draft, 3, greedy=True), model=True, variant=True),
    Case("eagle_chain", chain, head="eagle"),
    Case("eagle_static", static, head="eagle"),
    Case("eagle_best_chain", lambda head, vocab: chain(head, vocab, drawn=False), head="eagle"),
    Case("eagle_dynamic", dynamic, head="eagle"),
    Case("eagle3_chain", chain, head="eagle3"),
    Case("eagle3_static", static, head="eagle3"),  # a vocabulary of its own, so that q is exhausted
    Case("eagle3_dynamic", dynamic, head="eagle3"),
    Case("medusa_static", lambda heads, vocab: medusa(heads, BUSHY, vocab_size=vocab), head="medusa"),
]
BY_CASE = {case.name: case for case in CASES}
