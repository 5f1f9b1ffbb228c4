"""What a kind of draft head is: how it is recognised, loaded, and made into a drafter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jspec.errors import JspecError
from jspec.models import decoder
from jspec.models.heads import Head, Heads
from jspec.sampling.drafters.config import DraftConfig
from jspec.types import Drafter, Params
from jspec.weights.base import Source
from jspec.weights.load import Checkpoint


@runtime_checkable
class LoadHead(Protocol):
    """Read a head for a loaded target: the head, its params (what it shares with the target among
    them) and its settings. ``kernels``: options of `jspec.models.decoder.make_layers`."""

    def __call__(
        self, config: Mapping[str, Any], source: Source, target: Checkpoint, dtype: Any, **kernels: Any
    ) -> tuple[Any, Params, Any]: ...


@runtime_checkable
class HeadDrafter(Protocol):
    """The drafter around a head, as a `DraftConfig` asks for it.

    ``drawn``: above temperature 0 chains and static trees are drawn; False: always the head's best.
    Raises `JspecError` for a tree that the head cannot grow.
    """

    def __call__(
        self, head: Any, config: DraftConfig, vocab_size: int, context_length: int, drawn: bool, /
    ) -> Drafter: ...


@dataclass(frozen=True, eq=False)
class HeadKind:
    """One kind of head. A new one is a file with such a record, and a line in `jspec.weights.heads.KINDS`.

    * ``recognise(config.json, names of the tensors)``; kinds are asked in the order of `KINDS`.
    * ``random(target's config, target's params, dtype)``: a small head with random weights for a small
      target, which `jspec.certify` puts through the exact tests.
    """

    name: str
    recognise: Callable[[Mapping[str, Any], Collection[str]], bool]
    load: LoadHead
    drafter: HeadDrafter
    random: Callable[[decoder.Config, Params, str], tuple[Head | Heads, Params]]
    tensors: str  # what its files hold, for the error of a folder that is none
    default_tree: str = "chain"
    needs_config: bool = True  # False: every size is in the tensors


def grown_shape(
    head: Head | Heads, config: DraftConfig, default_tree: str, context_length: int, deepest: int = 5
) -> tuple[str, int, int]:
    """Kind of tree, depth and top-k that a config asks for. Raises `JspecError` for what does not fit."""
    kind = config.tree or default_tree
    for name in ("tree_size", "tree_depth", "tree_topk"):
        if kind == "chain" and getattr(config, name) is not None:
            raise JspecError(f"{name} is for trees: a chain has num_speculative_tokens drafts")
    depth = config.num_speculative_tokens if kind == "chain" else config.tree_depth or deepest
    if depth >= context_length:
        raise JspecError(f"drafts {depth} tokens deep do not fit the target's context of {context_length}")
    topk = config.tree_topk or min(8, head.vocab_size)
    if topk > head.vocab_size:
        raise JspecError(f"tree_topk = {topk}, but the head has only {head.vocab_size} tokens")
    return kind, depth, topk


def complete(topk: int, depth: int) -> int:
    """Nodes of the complete tree."""
    return sum(topk**level for level in range(1, depth + 1))


def tree_size(config: DraftConfig, default: int, most: int, topk: int, depth: int) -> int:
    """The nodes of a tree, if there are so many."""
    if config.tree_size is not None and config.tree_size > most:
        raise JspecError(
            f"a tree of {config.tree_size} nodes cannot be had: {topk} children a node and {depth} levels "
            f"make {most}"
        )
    return config.tree_size or min(default, most)
