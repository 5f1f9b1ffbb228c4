"""Answer a file of prompts: JSON lines in, JSON lines out, in ragged batches.

    python examples/offline_prompts.py prompts.jsonl answers.jsonl --target smollm2 --batch 8

A line of prompts.jsonl is ``{"prompt": text}``, ``{"messages": [{"role", "content"}, ...]}`` or a JSON
string. The answers have the order of the prompts, and do not depend on the size of the batch.
"""

from __future__ import annotations

import argparse
import json

import jspec
from jspec.text.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts")
    parser.add_argument("answers")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    target = jspec.load(options.target)
    draft = jspec.DraftConfig(options.draft, options.num_speculative_tokens)
    prompts = read_prompts(options.prompts)
    tokens = passes = 0
    with open(options.answers, "w", encoding="utf-8") as file:
        for start in range(0, len(prompts), options.batch):
            batch = prompts[start : start + options.batch]
            # A last batch of another size would be another program: fill it up, and drop what is too many.
            full = batch + [batch[-1]] * (options.batch - len(batch))
            answers = jspec.generate(
                full,
                target=target,
                draft=draft,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                seed=[options.seed + start + row for row in range(len(full))],
            )
            for prompt, answer in zip(batch, answers, strict=False):
                line = dict(prompt=prompt, answer=answer.text, finish_reason=answer.finish_reason)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                tokens += answer.metrics.num_tokens
                passes += answer.metrics.num_target_passes
            file.flush()
    print(f"{len(prompts)} answers, {tokens} tokens in {passes} passes: {tokens / passes:.2f} tokens a pass")


if __name__ == "__main__":
    main()
