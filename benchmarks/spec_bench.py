"""Drafters on Spec-Bench's prompts by category: ``python benchmarks/spec_bench.py question.jsonl``.

question.jsonl is that of github.com/hemingkx/Spec-Bench (``data/spec_bench``); the first
turn of a question is taken. SmolLM2-135M, float32, greedy, one row, `jspec.bench.measure` for each
category: drafter and plain decoding in turn in one process. A row gives

* x plain: plain time over this time, all prompts and repeats together;
* single prompts: the least, the median and the greatest of the prompts' own medians, and
  how many of them reach 2.0 and how many fall under 0.98;
* length: tokens a target pass, bonus counted; predicted and efficiency: see `jspec.bench.measure`.

The whole of it takes hours: ``--num-prompts`` spreads a few over each category.
``--row-cost R`` times nothing: it writes the texts, as one batch a category, counts their
passes, and says what they predict for a draft that costs nothing, where a pass of K + 1
rows costs R passes of one row. That does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import jax

import jspec
from jspec.bench.measure import DraftConfig, Result, bench
from jspec.serve.metrics import Metrics
from jspec.text.tokenizer import encode_prompt

CATEGORIES = "summarization,rag,writing,roleplay"


def questions(file: Path, category: str, count: int) -> list[str]:
    """The first turns of up to ``count`` questions, spread evenly over a category."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [row["turns"][0] for row in rows if row["category"] == category]
    if not found:
        known = ", ".join(sorted({row["category"] for row in rows}))
        raise SystemExit(f"{file} has no category {category!r}: it has {known}")
    count = min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def of_prompts(result: Result, prompts: int) -> list[float]:
    """Each prompt's median ratio, sorted; the ratios are in the order of repeats, then prompts."""
    return sorted(statistics.median(result.ratios[index::prompts]) for index in range(prompts))


def row(category: str, result: Result, prompts: int) -> str:
    """One Markdown row."""
    single, summary = of_prompts(result, prompts), result.to_dict()
    spread = f"{single[0]:.2f} / {statistics.median(single):.2f} / {single[-1]:.2f}"
    counts = f"{sum(r >= 2 for r in single)} | {sum(r < 0.98 for r in single)}"
    speeds = f"{result.speed_up:.2f} | {spread} | {counts} | {result.accept_length:.2f}"
    model = f"{summary['predicted_speed_up']:.2f} | {summary['loop_efficiency']:.2f}"
    costs = f"{result.row_cost:.2f} | {result.draft_cost:.3f}"
    return f"| {category} | {prompts} | {result.setting.name} | {speeds} | {costs} | {model} |"


def predicted(metrics: Metrics, row_cost: float) -> float:
    """The speed-up of a text by its passes alone, with a draft that costs nothing."""
    skip_empty_rounds = metrics.num_target_passes - metrics.num_drafts
    return metrics.num_tokens / (metrics.num_drafts * row_cost + skip_empty_rounds)


def counted(category: str, setting: DraftConfig, metrics: list[Metrics], row_cost: float) -> str:
    """One Markdown row of the passes of some texts."""
    single = sorted(predicted(m, row_cost) for m in metrics)
    tokens, passes = sum(m.num_tokens for m in metrics), sum(m.num_target_passes for m in metrics)
    drafts = sum(m.num_drafts for m in metrics)
    whole = tokens / (drafts * row_cost + passes - drafts)
    spread = f"{single[0]:.2f} / {statistics.median(single):.2f} / {single[-1]:.2f}"
    counts = f"{sum(r >= 2 for r in single)} | {sum(r < 0.98 for r in single)}"
    shares = f"{tokens / passes:.2f} | {drafts / passes:.0%}"
    return f"| {category} | {len(metrics)} | {setting.name} | {whole:.2f} | {spread} | {counts} | {shares} |"


COUNTED = (
    "| category | prompts | draft | predicted | single prompts | >= 2.0 | < 0.98 | length "
    "| rounds with a draft |\n"
    f"|{'---|' * 9}"
)
HEAD = (
    "| category | prompts | draft | x plain | single prompts | >= 2.0 | < 0.98 | length | r_K+1 | d "
    f"| predicted | efficiency |\n|{'---|' * 12}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="question.jsonl")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="ngram", help="with commas; as in `jspec bench`")
    parser.add_argument("--num-speculative-tokens", default="4", metavar="K,K")
    parser.add_argument("--categories", default=CATEGORIES)
    parser.add_argument("--num-prompts", type=int, default=8, help="of each category")
    parser.add_argument("--max-prompt-tokens", type=int, default=1500, help="longer prompts are left out")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--row-cost", type=float, metavar="R", help="count passes and time nothing")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, jax {jax.__version__}\n")
    print(COUNTED if options.row_cost else HEAD)
    target = jspec.load(options.target, "float32")
    ks = [int(k) for k in options.num_speculative_tokens.split(",")]
    settings = [DraftConfig(draft, k) for draft in options.draft.split(",") for k in ks]
    for category in options.categories.split(","):
        prompts = [
            prompt
            for prompt in questions(options.file, category, options.num_prompts)
            if len(encode_prompt(target.tokenizer, prompt)) <= options.max_prompt_tokens
        ]
        if not prompts:
            raise SystemExit(
                f"all {category} prompts that were taken have more than {options.max_prompt_tokens} tokens: "
                "raise --max-prompt-tokens or --num-prompts"
            )
        for setting in settings if options.row_cost else ():
            texts = jspec.generate(
                prompts,
                target=target,
                draft=setting.draft,
                num_speculative_tokens=setting.num_speculative_tokens,
                max_new_tokens=options.max_new_tokens,
            )
            metrics = [one.metrics for one in texts]
            print(counted(category, setting, metrics, options.row_cost), flush=True)
        if options.row_cost:
            continue
        results = bench(
            target, settings, prompts, max_new_tokens=options.max_new_tokens, repeats=options.repeats
        )
        for result in results[1:]:
            print(row(category, result, len(prompts)), flush=True)


if __name__ == "__main__":
    main()
