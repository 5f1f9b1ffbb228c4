"""Drafters: what guesses the next tokens. One file each; the contract is `jspec.types.Drafter`.

| builder | guesses | params |
|---|---|---|
| `none` | nothing: plain decoding | None |
| `ngram` | what followed the same words before (prompt lookup) | None |
| `bigram` | what followed each token last: a template for your own | None |
| `draft_model` | what a smaller model writes | the model's |
| `eagle_static`, `eagle_dynamic` | what an EAGLE head writes on the target's features | the head's |
| `medusa` | what heads guess from one feature, each for its own depth | the heads' |

A drafter of one's own without params is a file here and a line in `BY_NAME`: the command takes it
as ``--draft NAME``, and the tests put it through the conformance list.
"""

from __future__ import annotations

from collections.abc import Callable

from jspec.sampling.drafters.bigram import bigram
from jspec.sampling.drafters.config import DraftConfig
from jspec.sampling.drafters.draft_model import draft_model
from jspec.sampling.drafters.eagle import eagle_dynamic, eagle_static
from jspec.sampling.drafters.medusa import medusa
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none, simulated
from jspec.types import Drafter

__all__ = [
    "BY_NAME",
    "DraftConfig",
    "bigram",
    "draft_model",
    "eagle_dynamic",
    "eagle_static",
    "medusa",
    "ngram",
    "none",
    "simulated",
]

BY_NAME: dict[str, Callable[[int], Drafter]] = {
    "none": lambda num_speculative_tokens: none(),
    "ngram": ngram,
    "bigram": bigram,
}
"""Drafters without params: ``--draft`` name -> builder of K tokens."""
