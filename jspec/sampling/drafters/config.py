"""What drafts and how: the one value that Python, `jspec.generate` and the command line share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jspec.errors import JspecError, positive

TREES = ("chain", "static", "dynamic")


@dataclass(frozen=True)
class DraftConfig:
    """A draft by name, and its settings; None where the draft decides. Equal values are one program.

    Args:
        draft: a name of `jspec.sampling.drafters.BY_NAME` ("ngram", the default, is prompt lookup;
            "none" is plain decoding), "self:LAYERS" (the target's own first layers), the folder of
            a model with the same tokenizer, or the folder of a draft head (EAGLE-1, 2, 3, Medusa).
        num_speculative_tokens: K, drafts a round in a chain.
        tree: how a head's drafts grow: "chain", "static" or "dynamic" (EAGLE-2: the likeliest first).
        tree_size: drafted nodes, the root not counted.
        tree_depth: levels.
        tree_topk: children of a node, at most.
        simulated_acceptance: instead of a draft, to time the loop: drafts at depth 1, 2, ... are
            kept with these chances, whatever they say. **The text is not real.**

    Raises:
        JspecError: a number out of range, an unknown tree, settings that exclude each other.

    >>> DraftConfig("ngram", num_speculative_tokens=8).name
    'ngram K=8'
    """

    draft: str | None = None
    num_speculative_tokens: int = 4
    tree: str | None = None
    tree_size: int | None = None
    tree_depth: int | None = None
    tree_topk: int | None = None
    simulated_acceptance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        positive("num_speculative_tokens", self.num_speculative_tokens)
        for name in ("tree_size", "tree_depth", "tree_topk"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)
        if self.tree is not None and self.tree not in TREES:
            raise JspecError(f"unknown tree {self.tree!r}: choose one of {', '.join(TREES)}")
        object.__setattr__(self, "simulated_acceptance", tuple(self.simulated_acceptance))
        if self.simulated_acceptance and self.draft is not None:
            raise JspecError(
                f"simulated acceptance takes the place of a draft: give either it or the draft {self.draft!r}"
            )
        if self.simulated_acceptance and self.tree not in (None, "chain"):
            raise JspecError(f"simulated acceptance is of a chain, not of a {self.tree} tree")

    @property
    def source(self) -> str:
        """The draft's name or path; "ngram" where none is given."""
        return self.draft or "ngram"

    @property
    def is_tree(self) -> bool:
        """Whether any setting asks for a tree."""
        given = (self.tree_size, self.tree_depth, self.tree_topk)
        return self.tree not in (None, "chain") or any(value is not None for value in given)

    @property
    def name(self) -> str:
        """For tables."""
        if self.simulated_acceptance:
            return "simulated (not real text)"
        if self.draft == "none":
            return "none"
        draft = Path(self.source).name
        if self.tree in ("static", "dynamic"):
            return f"{draft} {self.tree}" + (f" N={self.tree_size}" if self.tree_size else "")
        return f"{draft} K={self.num_speculative_tokens}"
