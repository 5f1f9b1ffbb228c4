"""What drafts for a target: a name, a folder or a `DraftConfig` -> a drafter and its params."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

from jspec.decode import Decoder, make_decoder
from jspec.errors import JspecError
from jspec.sampling.drafters import BY_NAME, DraftConfig, draft_model, simulated
from jspec.sampling.verifiers import simulated_lossy
from jspec.serve.target import Target, load
from jspec.text.tokenizer import check_same_vocabulary
from jspec.types import Drafter, Model, Params, Verifier
from jspec.weights import heads
from jspec.weights.heads.base import HeadKind


class LoadedDraft(NamedTuple):
    """A drafter for a target."""

    target: Target  # the one given, with the features that the draft reads
    drafter: Drafter
    params: Params
    verifier: Verifier | None = None  # one that it needs
    head: HeadKind | None = None  # of a draft head

    def decoder(self, verifier: str | Verifier = "token", **options: Any) -> Decoder:
        """The compiled loop; ``options`` are those of `jspec.make_decoder`."""
        options = {"decide": self.target.kernels.decide, **options}
        return make_decoder(self.target.model, self.drafter, self.verifier or verifier, **options)


def load_draft(
    target: Target,
    draft: str | DraftConfig | Drafter | None = None,
    draft_params: Params = None,
    *,
    is_sampled: bool = True,
) -> LoadedDraft:
    """Find, or load, what drafts for a target.

    Args:
        target: what `jspec.load` gave.
        draft: a name or path, a `DraftConfig`, or a `Drafter` of one's own with its ``draft_params``.
        draft_params: of a `Drafter`.
        is_sampled: some row's temperature is above 0. Greedy rows have no use for a drawn tree, which
            costs a little more than its best tokens.

    Raises:
        JspecError: an unknown draft, one that does not fit the target, settings that it cannot take.
    """
    if isinstance(draft, Drafter):
        return LoadedDraft(target, draft, draft_params)
    if draft_params is not None:
        raise JspecError(f"draft_params are for a Drafter: the draft {draft!r} brings its own")
    config = draft if isinstance(draft, DraftConfig) else DraftConfig(draft)
    return _load(target, config, is_sampled or config.tree != "static")


@functools.lru_cache(maxsize=16)
def _load(target: Target, config: DraftConfig, drawn: bool) -> LoadedDraft:
    if config.simulated_acceptance:
        chances = config.simulated_acceptance
        return LoadedDraft(target, simulated(len(chances)), None, simulated_lossy(chances))
    draft, count = config.source, config.num_speculative_tokens
    if draft not in BY_NAME and Path(draft).expanduser().exists() and heads.is_head(draft):
        return _head(target, draft, config, drawn)
    if config.is_tree:
        raise JspecError(f"the draft {draft!r} grows as a chain: trees are for draft heads (EAGLE, Medusa)")
    if draft in BY_NAME:
        return LoadedDraft(target, BY_NAME[draft](count), None)
    if draft.startswith("self:"):
        model, params = _first_layers(target, draft.removeprefix("self:"))
    elif Path(draft).expanduser().exists():
        other = load(draft, target.dtype, target.kernels.chosen)
        check_same_vocabulary(target.tokenizer, other.tokenizer)
        model, params = other.model, other.params
    else:
        choices = ", ".join((*BY_NAME, "self:LAYERS", "the folder of a model or of a draft head"))
        raise JspecError(f"unknown draft {draft!r}: choose one of {choices}")
    drafter = draft_model(model, count, vocab_size=target.model.vocab_size)
    return LoadedDraft(target, drafter, params)


def _head(target: Target, folder: str, config: DraftConfig, drawn: bool) -> LoadedDraft:
    """A draft head, and the target with the features that it reads."""
    kernels = target.kernels.of_model()
    loaded = heads.load_head(folder, target.checkpoint, **kernels)
    model = target.checkpoint.family.make(
        target.checkpoint.config, feature_layers=loaded.head.feature_layers, dtype=target.dtype, **kernels
    )
    drafter = loaded.kind.drafter(loaded.head, config, model.vocab_size, model.context_length, drawn)
    with_features = dataclasses.replace(target, model=model)
    return LoadedDraft(with_features, drafter, loaded.params, head=loaded.kind)


def _first_layers(target: Target, count: str) -> tuple[Model, Params]:
    """The target cut after its first layers: a draft model without weights of its own."""
    config, params = target.checkpoint.config, target.params
    if not count.isdecimal() or not 0 < int(count) < config.layers:
        raise JspecError(f"self:{count} should be self:1 to self:{config.layers - 1}, a number of layers")
    short = dataclasses.replace(config, layers=int(count))
    model = target.checkpoint.family.make(short, dtype=target.dtype, **target.kernels.of_model())
    return model, {**params, "layers": params["layers"][: int(count)]}
