"""Remake the golden folders: small random models of every family as transformers saves and runs them.

Needs torch and transformers: ``python tests/models/make_golden.py [OUT [CASE ...]]``. The live test
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

GEMMA = dict(
    model_type="gemma3_text",
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=3,
    head_dim=12,
    query_pre_attn_scalar=20,
    sliding_window=5,
    tie_word_embeddings=True,
)
FULL, LOCAL = "full_attention", "sliding_attention"

# Odd on purpose: heads as wide as nothing else, one kv head, windows far shorter than the text.
MODELS = {
    "gqa_untied": {},
    "tied": dict(tie_word_embeddings=True),
    "one_kv_head": dict(num_key_value_heads=1),
    "wide_heads": dict(head_dim=24),
    "llama3_rope": dict(rope_parameters=LLAMA3),
    "linear_rope": dict(rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=4.0)),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "mistral": dict(model_type="mistral", sliding_window=5, num_key_value_heads=1, head_dim=12),
    "mistral_full": dict(model_type="mistral", sliding_window=None),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen2_window": dict(model_type="qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": dict(model_type="qwen3", head_dim=12, tie_word_embeddings=True, num_key_value_heads=1),
    "qwen3_window": dict(
        model_type="qwen3",
        head_dim=20,
        intermediate_size=16,
        num_key_value_heads=1,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=[LOCAL, FULL],
    ),
    "gemma3": dict(**GEMMA, sliding_window_pattern=2, num_key_value_heads=1),
    "gemma3_caps": dict(
        **GEMMA,
        layer_types=[FULL, LOCAL, LOCAL],
        final_logit_softcapping=6.0,
        attn_logit_softcapping=2.0,
        attention_bias=True,
        rope_parameters={
            FULL: dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
            LOCAL: dict(rope_type="default", rope_theta=300.0),
        },
    ),
}

# Texts are of 24 tokens: longer than an original length of 16, shorter than one of 48.
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=100.0,
    short_factor=[1.0 + 0.1 * i for i in range(10)],
    long_factor=[2.0 + 0.7 * i for i in range(10)],
)
ROPES = {
    "yarn": dict(head_dim=24, rope_parameters=YARN),
    "yarn_settings": dict(
        model_type="qwen3",
        head_dim=20,
        rope_parameters=dict(
            **YARN, mscale=2.0, mscale_all_dim=0.5, beta_fast=2.0, beta_slow=0.25, truncate=False
        ),
    ),
    "yarn_attention": dict(model_type="qwen2", rope_parameters=dict(**YARN, attention_factor=1.5)),
    "longrope_long": dict(head_dim=20, rope_parameters=dict(**LONGROPE, original_max_position_embeddings=16)),
    "longrope_short": dict(
        model_type="mistral",
        sliding_window=5,
        head_dim=20,
        max_position_embeddings=48,
        rope_parameters=dict(**LONGROPE, original_max_position_embeddings=48, factor=8.0),
    ),
    "dynamic": dict(
        model_type="qwen3",
        head_dim=12,
        rope_parameters=dict(rope_type="dynamic", rope_theta=50.0, factor=4.0),
    ),
    "gemma3_ropes": dict(
        **GEMMA,
        layer_types=[LOCAL, FULL, LOCAL],
        num_key_value_heads=1,
        rope_parameters={
            FULL: YARN,
            LOCAL: dict(
                rope_type="longrope",
                rope_theta=300.0,
                factor=3.0,
                short_factor=[1.0] * 6,
                long_factor=[1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
                original_max_position_embeddings=16,
            ),
        },
    ),
}
CASES = MODELS | ROPES


def make(name: str, folder: Path) -> None:
    """Save one model and its logits on two prompts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"model_type": "llama", **BASE, **CASES[name]}
    family = settings.pop("model_type")
    table = MODELS if name in MODELS else ROPES
    siblings = [n for n, case in table.items() if case.get("model_type", "llama") == family]
    torch.manual_seed(sorted(siblings).index(name))
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # transformers reads Gemma 3's score cap, but hands it to no layer
    cap = getattr(config, "attn_logit_softcapping", None)
    options = {} if cap is None else {"softcap": cap}
    centre = 0 if family.startswith("gemma") else 1
    with torch.no_grad():
        for key, value in model.named_parameters():
            # peaked attention and uneven norms: a wrong position or norm moves every logit
            noise = torch.randn_like(value)
            value.copy_(centre + 0.3 * noise if "norm" in key else 0.2 * noise)
        tokens = torch.randint(0, BASE["vocab_size"], (2, 24))
        output = model(tokens, output_hidden_states=True, **options)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    hidden = torch.stack(output.hidden_states).numpy()
    np.savez_compressed(
        folder / "golden.npz", tokens=tokens.numpy(), logits=output.logits.numpy(), hidden=hidden[:, :1]
    )


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden"
    for name in sys.argv[2:] or CASES:
        make(name, out / name)
        size = sum(f.stat().st_size for f in (out / name).iterdir())
        print(json.dumps({"case": name, "bytes": size}))


if __name__ == "__main__":
    main()
