"""Remake golden_gemma3.npz: Gemma 3 270M as transformers reads it from GGUF and runs it in float32.

Needs torch, transformers, accelerate and the packages that `tests.gemma3` names:
``python tests/make_golden_gemma3.py``. Only token ids and a few logits are stored.
"""

from pathlib import Path

import numpy as np

from tests import gemma3

HERE = Path(__file__).parent
PROMPT, NEW_TOKENS = 620, 24  # the window is 512


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = gemma3.gguf_file()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = gemma3.tokens((HERE.parent / "LICENSE").read_text())[:PROMPT]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack([step[0].topk(2).values for step in out.logits])
    np.savez_compressed(
        HERE / "golden_gemma3.npz",
        tokens=np.array(ids, np.int32),
        rows=np.arange(0, PROMPT, gemma3.EVERY_ROW),
        logits=logits[:: gemma3.EVERY_ROW, :: gemma3.EVERY_ID],
        greedy=out.sequences[0, PROMPT:].numpy().astype(np.int32),
        margins=(top[:, 0] - top[:, 1]).numpy(),
    )
    print(model.config, out.sequences[0, PROMPT:].tolist(), (top[:, 0] - top[:, 1]).min())


if __name__ == "__main__":
    main()
