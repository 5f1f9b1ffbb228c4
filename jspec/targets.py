"""What names mean: loading the target, and finding or loading what drafts for it.

Targets are loaded once and kept for the next call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jspec import checkpoint, smollm2, text
from jspec.errors import JspecError
from jspec.sampling.drafters.model import model as draft_model
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.types import Drafter, Model, Params

DRAFTS: dict[str, Callable[[int], Drafter]] = {"none": lambda _: none(), "ngram": ngram}
"""``draft=`` -> what makes the drafter of K tokens."""


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target: what `generate` needs of it."""

    model: Model
    params: Params
    tokenizer: Any
    stop_ids: tuple[int, ...]
    checkpoint: checkpoint.Checkpoint
    dtype: str


@functools.lru_cache(maxsize=2)
def load(target: str = "smollm2", dtype: str = "auto") -> Target:
    """Load a target: "smollm2", a Hugging Face or Orbax folder (`jspec.orbax_folder`), or a
    GGUF file with tokenizer files (tokenizer.json, tokenizer_config.json) beside it.

    ``dtype``: "float32", "bfloat16", "float16", or "auto": float32 on CPUs, whose
    one-row bfloat16 products are slow, bfloat16 elsewhere. Raises `JspecError`.
    """
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    folder = smollm2.ensure() if target == "smollm2" else target
    loaded = checkpoint.load(folder, dtype)
    tokenizer = text.load_tokenizer(loaded.home)
    model = loaded.family.make(loaded.config, dtype=dtype)
    return Target(model, loaded.params, tokenizer, text.stop_ids(loaded.home, tokenizer), loaded, dtype)


@functools.lru_cache(maxsize=16)
def find_draft(target: Target, draft: str, num_speculative_tokens: int, dtype: str) -> tuple[Drafter, Params]:
    """The drafter that ``draft`` names, and its params. Raises `JspecError`."""
    positive("num_speculative_tokens", num_speculative_tokens)
    if draft in DRAFTS:
        return DRAFTS[draft](num_speculative_tokens), None
    if draft.startswith("self:"):
        model, params = _first_layers(target, draft.removeprefix("self:"))
    elif Path(draft).expanduser().exists():
        other = load(draft, dtype)
        text.check_same_vocabulary(target.tokenizer, other.tokenizer)
        model, params = other.model, other.params
    else:
        choices = ", ".join((*DRAFTS, "self:LAYERS", "a model folder"))
        raise JspecError(f"unknown draft {draft!r}: choose one of {choices}")
    return draft_model(model, num_speculative_tokens, vocab_size=target.model.vocab_size), params


def _first_layers(target: Target, count: str) -> tuple[Model, Params]:
    """The target cut after its first layers: a draft model without weights of its own."""
    config, params = target.checkpoint.config, target.params
    if not count.isdecimal() or not 0 < int(count) < config.layers:
        raise JspecError(f"self:{count} should be self:1 to self:{config.layers - 1}, a number of layers")
    short = dataclasses.replace(config, layers=int(count))
    model = target.checkpoint.family.make(short, dtype=target.dtype)
    return model, {**params, "layers": params["layers"][: int(count)]}


def positive(name: str, value: int) -> int:
    """The value, if it is a whole number of at least 1; else `JspecError`."""
    if not isinstance(value, int) or value < 1:
        raise JspecError(f"{name} = {value!r} should be a whole number of at least 1")
    return value
