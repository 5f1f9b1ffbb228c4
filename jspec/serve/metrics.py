"""What a generation cost and what speculation brought, in the field's terms.

* **accept length**: emitted tokens per target pass, the target's own token (the
  "bonus") counted, as EAGLE and SGLang count it; without any drafting it is 1.
* **acceptance rate**: accepted / proposed draft tokens; of a tree, accepted depths / depths
  that had a draft.
* **acceptance per position**: of the drafts submitted at depth 1, 2, ..., the share
  that was accepted together with all before it (unconditional).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jspec.types import Stats


@dataclass(frozen=True)
class Seconds:
    """Wall time of one call; ``compile`` is what only the first call of a shape pays.

    ``draft`` and ``verify`` are None where the whole loop ran as one program.
    """

    compile: float
    prefill: float
    decode: float  # all rounds
    draft: float | None = None
    verify: float | None = None

    @property
    def rest(self) -> float | None:
        """Of ``decode``: neither draft nor verify, such as reading tokens and making text."""
        if self.draft is None or self.verify is None:
            return None
        return self.decode - self.draft - self.verify


@dataclass(frozen=True)
class Metrics:
    """Counts of one row, and the time of the call it was part of."""

    num_prompt_tokens: int
    num_tokens: int  # emitted
    num_target_passes: int
    num_drafts: int  # rounds that proposed something
    num_draft_tokens: int
    num_accepted_tokens: int
    proposed_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: Seconds | None = None

    @property
    def accept_length(self) -> float:
        """Emitted tokens per target pass, bonus counted; 0 where nothing ran."""
        return self.num_tokens / self.num_target_passes if self.num_target_passes else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed; None where nothing was proposed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_per_position(self) -> list[float | None]:
        """Accepted / submitted at depth 1, 2, ...; None where nothing was submitted."""
        pairs = zip(self.accepted_per_position, self.proposed_per_position, strict=True)
        return [accepted / proposed if proposed else None for accepted, proposed in pairs]

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens over the time of the rounds (neither compilation nor prefill)."""
        return self.num_tokens / self.seconds.decode if self.seconds and self.seconds.decode else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        derived = ("accept_length", "acceptance_rate", "acceptance_per_position", "tokens_per_second")
        values = asdict(self) | {name: getattr(self, name) for name in derived}
        if self.seconds:
            values["seconds"]["rest"] = self.seconds.rest
        return values


def summarize(
    stats: Stats, prompt_length: Sequence[int], num_tokens: Sequence[int], seconds: Seconds
) -> list[Metrics]:
    """One `Metrics` a row from what the host has read of a final state.

    >>> counts = np.array([[2, 1]])
    >>> metrics = summarize(Stats(np.array([3]), counts + 1, counts), [5], [6], Seconds(0.0, 0.0, 2.0))[0]
    >>> metrics.accept_length, metrics.acceptance_rate, metrics.tokens_per_second
    (2.0, 0.6, 3.0)
    """
    rows = zip(prompt_length, num_tokens, stats.rounds, stats.proposed, stats.accepted, strict=True)
    return [
        Metrics(
            num_prompt_tokens=int(prompt),
            num_tokens=int(tokens),
            num_target_passes=int(rounds),
            num_drafts=int(proposed[0]) if proposed.size else 0,
            num_draft_tokens=int(proposed.sum()),
            num_accepted_tokens=int(accepted.sum()),
            proposed_per_position=np.asarray(proposed).tolist(),
            accepted_per_position=np.asarray(accepted).tolist(),
            seconds=seconds,
        )
        for prompt, tokens, rounds, proposed, accepted in rows
    ]
