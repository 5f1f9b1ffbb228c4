"""Remake golden_smollm2.npz and .json: SmolLM2 as transformers runs it, in float32.

Needs torch, transformers and Spec-Bench's question.jsonl (Apache-2.0):
``python tests/make_golden_smollm2.py QUESTIONS``. The prompts are stored with the answer.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

NEW_TOKENS, LONGEST = 48, 330
HERE = Path(__file__).parent


def choose(questions: list[str], tokenizer) -> list[str]:
    """20 prompts, those with code, double spaces and digits first."""
    kinds = [r"```|def |\bprint\(", r"\S  \S", r"\d{3}", r"\d", "."]
    chosen: list[str] = []
    for kind, upto in zip(kinds, (4, 8, 12, 16, 20), strict=True):
        for text in questions:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            if len(chosen) < upto and text not in chosen and re.search(kind, text) and len(ids) < LONGEST:
                chosen.append(text)
    return chosen


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jspec.weights.smollm2 import ensure

    folder = ensure()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    rows = []
    for text in choose([line["turns"][0] for line in lines], tokenizer):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = torch.stack([step[0].topk(2).values for step in out.logits])
        tokens = out.sequences[0, len(prompt) :].tolist()
        margins = (top[:, 0] - top[:, 1]).numpy().round(5).tolist()
        rows.append({"prompt": text, "prompt_ids": prompt, "tokens": tokens, "margins": margins})
        print(len(prompt), len(tokens), min(margins), flush=True)
    (HERE / "golden_smollm2.json").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    ids = np.array(rows[0]["prompt_ids"][:40])
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None]).logits[0].numpy()
    np.savez_compressed(HERE / "golden_smollm2.npz", tokens=ids, logits=logits[:, ::97], last=logits[-1])


if __name__ == "__main__":
    main()
