"""Remake the golden folders: small random Llama models as transformers saves and runs them.

Needs torch and transformers: ``python tests/models/make_golden.py [OUT]``. The live test
(``pytest -m live``) makes them anew and compares, so the folders cannot go stale unseen.
"""

import json
import sys
from pathlib import Path

import numpy as np

BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)

CASES = {
    "gqa_untied": {},
    "tied": dict(tie_word_embeddings=True),
    "one_kv_head": dict(num_key_value_heads=1),
    "wide_heads": dict(head_dim=24),
    "llama3_rope": dict(rope_parameters=LLAMA3),
    "linear_rope": dict(rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=4.0)),
    "biases": dict(attention_bias=True, mlp_bias=True),
}


def make(name: str, folder: Path) -> None:
    """Save one model and its logits on two prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(sorted(CASES).index(name))
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **CASES[name]})).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            # peaked attention and uneven norms: a wrong position or norm moves every logit
            value.copy_(1 + 0.3 * torch.randn_like(value) if "norm" in key else 0.2 * torch.randn_like(value))
        tokens = torch.randint(0, BASE["vocab_size"], (2, 24))
        output = model(tokens, output_hidden_states=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    hidden = torch.stack(output.hidden_states).numpy()
    np.savez_compressed(
        folder / "golden.npz", tokens=tokens.numpy(), logits=output.logits.numpy(), hidden=hidden[:, :1]
    )


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden"
    for name in CASES:
        make(name, out / name)
        size = sum(f.stat().st_size for f in (out / name).iterdir())
        print(json.dumps({"case": name, "bytes": size}))


if __name__ == "__main__":
    main()
