"""What drafts for a target: names and folders -> drafters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jspec import api, heads, shapes, text
from jspec.decode import Decoder
from jspec.errors import JspecError
from jspec.sampling import lossy
from jspec.sampling.drafters import eagle
from jspec.sampling.drafters.medusa import medusa
from jspec.sampling.drafters.model import model as draft_model
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none, simulated
from jspec.sampling.verify import Verifier
from jspec.targets import Target, load, positive
from jspec.types import Drafter, Model, Params

NAMED: dict[str, Callable[[int], Drafter]] = {"none": lambda _: none(), "ngram": ngram}
TREES = ("chain", "static", "dynamic")


@dataclass(frozen=True)
class Drafting:
    """What drafts and how, as `jspec.generate` names it; None where the draft decides.

    ``tree_size``: drafted nodes, the root not counted. ``drawn``: above temperature 0 a
    head's chains and static trees are drawn; False: always its best.
    """

    draft: str | None = None
    num_speculative_tokens: int = 4
    tree: str | None = None
    tree_size: int | None = None
    tree_depth: int | None = None
    tree_topk: int | None = None
    simulated_acceptance: tuple[float, ...] = ()
    drawn: bool = True

    @property
    def name(self) -> str:
        """For tables."""
        if self.simulated_acceptance:
            return "simulated (not real text)"
        if self.draft == "none":
            return "none"
        draft = Path(self.draft or "ngram").name
        if self.tree in ("static", "dynamic"):
            return f"{draft} {self.tree}" + (f" N={self.tree_size}" if self.tree_size else "")
        return f"{draft} K={self.num_speculative_tokens}"


class Found(NamedTuple):
    """``target``: the one given, with the features that the draft reads. ``rule``: one that it needs."""

    kind: str
    target: Target
    drafter: Drafter
    params: Params
    rule: Verifier | None = None

    def decoder(self, verifier: str | Verifier = "token", **options: Any) -> Decoder:
        """The compiled loop; ``options`` are those of `jspec.api.decoder`."""
        options = {"decide": self.target.kernels.decide, **options}
        return api.decoder(self.target.model, self.drafter, self.rule or verifier, **options)


@functools.lru_cache(maxsize=16)
def find_draft(target: Target, asked: Drafting) -> Found:
    """Find, or load, what drafts for a target. Raises `JspecError`."""
    positive("num_speculative_tokens", asked.num_speculative_tokens)
    if asked.simulated_acceptance:
        return _simulated(target, asked)
    draft = asked.draft or "ngram"
    if draft not in NAMED and Path(draft).expanduser().exists() and heads.is_head(draft):
        return _head(target, draft, asked)
    if asked.tree not in (None, "chain") or asked.tree_size or asked.tree_depth or asked.tree_topk:
        raise JspecError(f"the draft {draft!r} grows as a chain: trees are for draft heads (EAGLE, Medusa)")
    if draft in NAMED:
        return Found(draft, target, NAMED[draft](asked.num_speculative_tokens), None)
    if draft.startswith("self:"):
        model, params = _first_layers(target, draft.removeprefix("self:"))
    elif Path(draft).expanduser().exists():
        other = load(draft, target.dtype, target.kernels.chosen)
        text.check_same_vocabulary(target.tokenizer, other.tokenizer)
        model, params = other.model, other.params
    else:
        choices = ", ".join((*NAMED, "self:LAYERS", "the folder of a model or of a draft head"))
        raise JspecError(f"unknown draft {draft!r}: choose one of {choices}")
    drafter = draft_model(model, asked.num_speculative_tokens, vocab_size=target.model.vocab_size)
    return Found("model", target, drafter, params)


def _simulated(target: Target, asked: Drafting) -> Found:
    if asked.draft is not None:
        raise JspecError(
            f"simulated acceptance takes the place of a draft: give either it or the draft {asked.draft!r}"
        )
    if asked.tree not in (None, "chain"):
        raise JspecError(f"simulated acceptance is of a chain, not of a {asked.tree} tree")
    rule = lossy.simulated(asked.simulated_acceptance)
    return Found("simulated", target, simulated(len(asked.simulated_acceptance)), None, rule)


def _head(target: Target, folder: str, asked: Drafting) -> Found:
    """A draft head, and the target with the features that it reads."""
    kernels = target.kernels.of_model()
    loaded = heads.load_head(folder, target.checkpoint, **kernels)
    model = target.checkpoint.family.make(
        target.checkpoint.config, taps=loaded.head.taps, dtype=target.dtype, **kernels
    )
    drafter = head_drafter(loaded.kind, loaded.head, asked, model.vocab_size, model.max_length)
    return Found(loaded.kind, dataclasses.replace(target, model=model), drafter, loaded.params)


def head_drafter(kind: str, head: Any, asked: Drafting, vocab_size: int, max_length: int) -> Drafter:
    """The drafter around a head. Raises `JspecError` for a tree that it cannot grow."""
    tree = asked.tree or ("static" if kind == "medusa" else "chain")
    if tree not in TREES:
        raise JspecError(f"unknown tree {tree!r}: choose one of {', '.join(TREES)}")
    settings = {"tree_size": asked.tree_size, "tree_depth": asked.tree_depth, "tree_topk": asked.tree_topk}
    given = {name: positive(name, value) for name, value in settings.items() if value is not None}
    if tree == "chain" and given:
        raise JspecError(f"{next(iter(given))} is for trees: a chain has num_speculative_tokens drafts")
    depth = asked.num_speculative_tokens if tree == "chain" else given.get("tree_depth", 5)
    if kind == "medusa" and tree != "chain":
        depth = given.get("tree_depth", min(depth, head.count))
    if depth >= max_length:
        raise JspecError(f"drafts {depth} tokens deep do not fit the target's context of {max_length}")
    topk = given.get("tree_topk", min(8, head.vocab_size))
    if topk > head.vocab_size:
        raise JspecError(f"tree_topk = {topk}, but the head has only {head.vocab_size} tokens")
    if kind == "medusa":
        return _medusa(head, tree, given.get("tree_size"), depth, topk, vocab_size)
    if tree == "dynamic":
        size = _size(given.get("tree_size"), 31, topk + (depth - 1) * topk**2, topk, depth)
        return eagle.best_first(head, size=size, depth=depth, topk=topk, vocab_size=vocab_size)
    shape = shapes.chain(depth)
    if tree == "static":
        size = _size(given.get("tree_size"), 25, _nodes(topk, depth), topk, depth)
        shape = shapes.likeliest(size, depth, topk) if given else shapes.EAGLE_TREE
    return eagle.fixed(head, shape, vocab_size=vocab_size, drawn=asked.drawn)


def _medusa(head: Any, tree: str, size: int | None, depth: int, topk: int, vocab_size: int) -> Drafter:
    if tree == "dynamic":
        raise JspecError("Medusa's heads do not see each other's guesses: they grow a chain or a static tree")
    if depth > head.count:
        raise JspecError(f"drafts {depth} tokens deep need as many Medusa heads; there are {head.count}")
    shape = shapes.chain(depth)
    if tree == "static":
        shape = shapes.likeliest(_size(size, 25, _nodes(topk, depth), topk, depth), depth, topk)
    return medusa(head, shape, vocab_size=vocab_size)


def _nodes(topk: int, depth: int) -> int:
    """Of the complete tree."""
    return sum(topk**level for level in range(1, depth + 1))


def _size(asked: int | None, default: int, most: int, topk: int, depth: int) -> int:
    """The nodes of a tree, if there are so many."""
    if asked is not None and asked > most:
        raise JspecError(
            f"a tree of {asked} nodes cannot be had: {topk} children a node and {depth} levels make {most}"
        )
    return min(default, most) if asked is None else asked


def _first_layers(target: Target, count: str) -> tuple[Model, Params]:
    """The target cut after its first layers: a draft model without weights of its own."""
    config, params = target.checkpoint.config, target.params
    if not count.isdecimal() or not 0 < int(count) < config.layers:
        raise JspecError(f"self:{count} should be self:1 to self:{config.layers - 1}, a number of layers")
    short = dataclasses.replace(config, layers=int(count))
    model = target.checkpoint.family.make(short, dtype=target.dtype, **target.kernels.of_model())
    return model, {**params, "layers": params["layers"][: int(count)]}
