"""The certificate of a target and a draft: the pair greedily, the rules exactly, the loop by χ²."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jspec import api, text
from jspec.certify import greedy, loop, rules
from jspec.certify.tiny import VOCAB, tiny, tiny_head
from jspec.drafts import Drafting, find_draft, head_drafter
from jspec.errors import JspecError
from jspec.heads import LOADERS
from jspec.sampling.drafters.model import model as draft_model
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.targets import Target
from jspec.types import Drafter, Model, Params

EXACT = 1e-12  # a larger total-variation error is a fault
CHANCE = 1e-6  # so is a smaller p-value; of the 20 or so of a run a right program shows one in 50000 runs


@dataclass(frozen=True)
class Certificate:
    """What was found. ``coupled``: rows whose coupled text is not the plain one."""

    greedy: list[greedy.Greedy]
    exact: list[rules.Exact]
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
            f"the rule {e.rule!r} misses the law by {e.error:.2g} ({e.drafts} drafts, {e.worst})"
            for e in self.exact
            if e.error > EXACT
        ]
        found += [
            f"the loop with rule {c.rule!r} writes another law: p = {min(c.p_values):.2g}"
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
            "exact_law": [found._asdict() for found in self.exact],
            "chi_square": [found._asdict() for found in self.loop],
            "coupled_differences": self.coupled,
        }


def certify(
    target: Target,
    draft: str | Drafting,
    prompts: Sequence[text.Prompt],
    *,
    max_new_tokens: int = 64,
    verifiers: Sequence[str] = (),
    tolerance: float | None = None,
    rows: int = 4000,
    progress: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Check a target and a draft, named as for `jspec.generate` (or as a `Drafting`), on this machine.

    The greedy texts of the real pair, also in the same program; the exact law of each
    rule, in float64; and the whole loop at temperature and with every other setting, with
    a drafter of the same kind on a target small enough to enumerate, in the same dtype.

    ``verifiers``: names of `jspec.api.VERIFIERS` (default: all that can judge this draft).
    ``rows``: of each χ² test. Raises `JspecError` for a draft that does not fit, and for a
    rule that is lossy by its own words.
    """
    asked = draft if isinstance(draft, Drafting) else Drafting(draft)
    found = find_draft(target, asked)
    names = verifiers or [name for name, rule in api.VERIFIERS.items() if rule.lossless]
    chosen = [found.rule] if found.rule else [api.find_verifier(name) for name in names]
    for rule in chosen:
        rules.check_lossless(rule)
    drafter = found.drafter
    legal = [rule for rule in chosen if drafter.growth in rule.growths]
    if not legal:
        raise JspecError(f"none of the verifiers {', '.join(verifiers)} can judge a {drafter.growth}")
    sampling = [rule for rule in legal if rule.name != "greedy"]
    tokens = [text.encode_prompt(target.tokenizer, prompt, False) for prompt in prompts]
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
                stop=target.stop_ids,
                tolerance=tolerance,
                rule=legal[0],
                same_shape=same_shape,
                decide=decide,
            )
        )
    exact, chances, coupled = [], [], 0
    small = twin_of(found.kind, asked, target.dtype)
    for rule in legal:
        progress(f"exact law, {rule.name}")
        exact += rules.exact_law(rule)
    for rule in sampling:
        progress(f"law of the loop, {rule.name}")
        chances.append(loop.chi_square(*small, rule, rows=rows, decide=decide))
        coupled += loop.coupled_differences(*small, rule, decide=decide) if rule.coupled else 0
    device = jax.devices()[0]
    where = dict(jax=jax.__version__, backend=jax.default_backend(), device=device.device_kind)
    return Certificate(runs, exact, chances, coupled, {**where, "dtype": target.dtype})


def twin_of(kind: str, asked: Drafting, dtype: str) -> tuple[Model, Params, Drafter, Params]:
    """A tiny target and a drafter of the same kind, whose drafts end within the enumerated text."""
    deepest = loop.LENGTH - 1
    k = min(asked.num_speculative_tokens, deepest)
    if kind in LOADERS:
        target, params, head, head_params = tiny_head(kind, dtype)
        small = dataclasses.replace(asked, num_speculative_tokens=k)
        if (asked.tree or ("static" if kind == "medusa" else "chain")) != "chain":
            small = dataclasses.replace(small, tree_size=7, tree_depth=deepest, tree_topk=2)
        return target, params, head_drafter(kind, head, small, VOCAB, target.max_length), head_params
    draft, draft_params = tiny(1, dtype)
    drafters = {"none": (none(), None), "ngram": (ngram(k, min_ngram=1), None)}
    return *tiny(0, dtype), *drafters.get(kind, (draft_model(draft, k), draft_params))
