"""Remake ``golden/policy.npz``: distributions as transformers' own processors compute them.

Needs torch and transformers: ``python tests/sampling/make_golden_policy.py [OUT]``. The live
test (``pytest -m live``) makes it anew and compares, so the file cannot go stale unseen.
The list of processors, and so their order, is `GenerationMixin._get_logits_processor`'s.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "policy.npz"
VOCAB, PROMPT, STEPS = 37, 6, 5
STOP = [3, 11]

# The settings of each case, by the names of `policy.make`.
CASES: dict[str, dict] = {
    "neutral": {},
    "greedy": dict(temperature=0.0),
    "cold": dict(temperature=0.3),
    "hot": dict(temperature=1.7),
    "top_k": dict(top_k=5),
    "top_k_beyond": dict(top_k=1000),
    "top_p": dict(top_p=0.8),
    "top_p_small": dict(top_p=0.01),
    "min_p": dict(min_p=0.1),
    "min_p_one": dict(min_p=1.0),
    "repetition": dict(repetition_penalty=1.8),
    "repetition_wanted": dict(repetition_penalty=0.6),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=-0.9),
    "bias": dict(logit_bias={2: 3.0, 5: -3.0, 30: 1.5}),
    "banned": dict(banned=[1, 2, 3]),
    "allowed": dict(allowed=[4, 7, 11, 20]),
    "min_new_tokens": dict(min_new_tokens=3),
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
    "bias_and_repetition": dict(logit_bias={7: -4.0, 8: 4.0}, repetition_penalty=2.0),
    "filters": dict(temperature=1.4, top_k=20, top_p=0.85, min_p=0.05),
    "greedy_penalised": dict(temperature=0.0, repetition_penalty=2.0, min_new_tokens=2, presence_penalty=2.0),
}
CASES["all"] = {
    **dict(temperature=1.6, top_k=22, top_p=0.95, min_p=0.02, repetition_penalty=1.4, presence_penalty=0.6),
    **dict(frequency_penalty=0.3, min_new_tokens=4, logit_bias={7: -4.0, 8: 4.0, 3: 5.0}, banned=[0, 9]),
}


def processors(options: dict):
    """transformers' list for these settings, with vLLM's two penalties as a custom processor."""
    import torch
    from transformers import GenerationConfig, GenerationMixin

    names = "temperature top_k top_p min_p repetition_penalty min_new_tokens".split()
    config = GenerationConfig(**{name: options[name] for name in names if options.get(name)})
    config.do_sample = options.get("temperature") != 0
    config.top_k = options.get("top_k", 0)  # 50 unless said otherwise
    if "logit_bias" in options:
        config.sequence_bias = {(token,): bias for token, bias in options["logit_bias"].items()}
    banned = set(options.get("banned", ())) | set(range(VOCAB)) - set(options.get("allowed", range(VOCAB)))
    config.suppress_tokens = sorted(banned) or None
    config._eos_token_tensor = torch.tensor(STOP)

    def openai(ids, scores):  # vllm/model_executor/layers/utils.py, apply_penalties
        counts = torch.zeros_like(scores).scatter_add_(1, ids[:, PROMPT:], torch.ones(ids[:, PROMPT:].shape))
        scores = scores - options.get("frequency_penalty", 0.0) * counts
        return scores - options.get("presence_penalty", 0.0) * (counts > 0)

    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda default, custom: [*default, *custom],
    )
    build = GenerationMixin._get_logits_processor
    return build(model, config, input_ids_seq_length=PROMPT, logits_processor=[openai], device="cpu")


def probs(options: dict, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The log-distribution after each of the last `STEPS` tokens, float32."""
    import torch

    rows = []
    for step in range(STEPS):
        ids = torch.tensor(tokens[:, : PROMPT + step].astype(np.int64))
        scores = torch.tensor(logits[:, step])
        for processor in processors(options):
            scores = processor(ids, scores)
        if options.get("temperature") == 0:
            best = torch.nn.functional.one_hot(scores.argmax(-1), VOCAB)
            scores = torch.where(best > 0, 0.0, -torch.inf)
        rows.append(scores.log_softmax(-1).numpy())
    return np.stack(rows, axis=1)


def make(path: Path) -> None:
    """Four rows of text of 6 to 10 tokens, the prompt of each 6; every case sees them all."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 12, (4, PROMPT + STEPS - 1)).astype(np.int32)  # with repeats
    logits = (2 * random.standard_normal((4, STEPS, VOCAB))).astype(np.float32)
    logits[:, :, -2:] = -np.inf  # a padded vocabulary
    all_probs = {name: probs(options, tokens, logits) for name, options in CASES.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, tokens=tokens, logits=logits, **all_probs)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if sys.argv[1:] else GOLDEN)
