"""The certificate of a target and a draft: the pair greedily, the verifiers exactly, the loop by χ²."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jspec.certify import exact, greedy, loop
from jspec.certify.tiny import VOCAB, tiny, tiny_head
from jspec.errors import JspecError
from jspec.sampling.drafters import BY_NAME, DraftConfig, draft_model, ngram
from jspec.sampling.verifiers import VERIFIERS, find_verifier
from jspec.serve.draft import load_draft
from jspec.serve.target import Target
from jspec.text.tokenizer import Prompt, encode_prompt
from jspec.types import Drafter, Model, Params
from jspec.weights.heads.base import HeadKind

EXACT = 1e-12  # a larger total-variation error is a fault
CHANCE = 1e-6  # so is a smaller p-value; of the 20 or so of a run a right program shows one in 50000 runs


@dataclass(frozen=True)
class Certificate:
    """What was found. ``coupled``: rows whose coupled text is not the plain one."""

    greedy: list[greedy.Greedy]
    exact: list[exact.Exact]
    loop: list[loop.ChiSquare]
    coupled: int
    where: dict[str, str]  # backend, device, dtype, versions

    @property
    def faults(self) -> list[str]:
        """What must not be: empty for a lossless program."""
        found = [
            f"greedy text of prompt {d.prompt} parts at token {d.position}: {d.plain} against {d.drafted}"
            + (" in the same program" if run.same_shape else f", top-2 margin {d.margin:.2g}")
            for run in self.greedy
            for d in run.differences
            if d.verdict == "fault"
        ]
        found += [
            f"the verifier {e.verifier!r} misses the target by {e.error:.2g} ({e.drafts} drafts, {e.worst})"
            for e in self.exact
            if e.error > EXACT
        ]
        found += [
            f"the loop with verifier {c.verifier!r} writes another distribution: p = {min(c.p_values):.2g}"
            for c in self.loop
            if min(c.p_values) < CHANCE
        ]
        found += [f"{self.coupled} coupled texts are not the plain ones"] if self.coupled else []
        return found

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        runs = [
            run._asdict() | {"differences": [d._asdict() for d in run.differences]} for run in self.greedy
        ]
        return {
            **self.where,
            "certified": not self.faults,
            "faults": self.faults,
            "greedy": runs,
            "exact_distribution": [found._asdict() for found in self.exact],
            "chi_square": [found._asdict() for found in self.loop],
            "coupled_differences": self.coupled,
        }


def certify(
    target: Target,
    draft: str | DraftConfig,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    verifiers: Sequence[str] = (),
    tolerance: float | None = None,
    rows: int = 4000,
    progress: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Check a target and a draft, named as for `jspec.generate` (or as a `DraftConfig`), on this machine.

    The greedy texts of the real pair, also in the same program; the exact distribution of each
    verifier, in float64; and the whole loop at temperature and with every other setting, with
    a drafter of the same kind on a target small enough to enumerate, in the same dtype.

    ``verifiers``: names of `jspec.sampling.verifiers.VERIFIERS` (default: all that can judge this draft).
    ``rows``: of each χ² test. Raises `JspecError` for a draft that does not fit, and for a
    verifier that is lossy by its own words.
    """
    config = draft if isinstance(draft, DraftConfig) else DraftConfig(draft)
    found = load_draft(target, config)
    names = verifiers or [name for name, verifier in VERIFIERS.items() if verifier.lossless]
    chosen = [found.verifier] if found.verifier else [find_verifier(name) for name in names]
    for verifier in chosen:
        exact.check_lossless(verifier)
    drafter = found.drafter
    legal = [verifier for verifier in chosen if drafter.growth in verifier.growths]
    if not legal:
        raise JspecError(f"none of the verifiers {', '.join(verifiers)} can judge a {drafter.growth}")
    sampling = [verifier for verifier in legal if not verifier.greedy_only]
    tokens = [encode_prompt(target.tokenizer, prompt, False) for prompt in prompts]
    runs, decide = [], target.kernels.decide
    for same_shape in (False, True):
        progress("greedy text" + (", same program" if same_shape else ""))
        runs.append(
            greedy.greedy_text(
                found.target.model,
                target.params,
                drafter,
                found.params,
                tokens,
                max_new_tokens=max_new_tokens,
                stop_token_ids=target.stop_token_ids,
                tolerance=tolerance,
                verifier=legal[0],
                same_shape=same_shape,
                decide=decide,
            )
        )
    sums: list[exact.Exact] = []
    chances, coupled = [], 0
    small = twin_of(config, found.head, target.dtype)
    for verifier in legal:
        progress(f"exact distribution, {verifier.name}")
        sums += exact.exact_distribution(verifier)
    for verifier in sampling:
        progress(f"distribution of the loop, {verifier.name}")
        chances.append(loop.chi_square(*small, verifier, rows=rows, decide=decide))
        coupled += loop.coupled_differences(*small, verifier, decide=decide) if verifier.coupled else 0
    device = jax.devices()[0]
    where = dict(jax=jax.__version__, backend=jax.default_backend(), device=device.device_kind)
    return Certificate(runs, sums, chances, coupled, {**where, "dtype": target.dtype})


def twin_of(config: DraftConfig, head: HeadKind | None, dtype: str) -> tuple[Model, Params, Drafter, Params]:
    """A tiny target and a drafter of the same kind, whose drafts end within the enumerated text."""
    deepest = loop.LENGTH - 1
    k = min(config.num_speculative_tokens, deepest)
    if head is not None:
        target, params, network, head_params = tiny_head(head, dtype)
        small = dataclasses.replace(config, num_speculative_tokens=k)
        if (config.tree or head.default_tree) != "chain":
            small = dataclasses.replace(small, tree_size=7, tree_depth=deepest, tree_topk=2)
        return target, params, head.drafter(network, small, VOCAB, target.context_length, True), head_params
    if config.source == "ngram":  # texts are too short for the default
        return *tiny(0, dtype), ngram(k, min_ngram=1), None
    if config.source in BY_NAME:
        return *tiny(0, dtype), BY_NAME[config.source](k), None
    draft, draft_params = tiny(1, dtype)
    return *tiny(0, dtype), draft_model(draft, k), draft_params
