"""The embedded default on real prompts, against transformers' float32 runs of it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import tree

HERE = Path(__file__).parent
ROWS = [json.loads(line) for line in (HERE / "golden_smollm2.json").read_text().splitlines()]
TIE = 1e-3  # top-2 margin under which two correct float32 programs may differ


@pytest.fixture(scope="module")
def target():
    return jspec.load("smollm2", "float32")


@pytest.fixture(scope="module")
def plain(target):
    prompts = [row["prompt"] for row in ROWS]
    return jspec.generate(prompts, target=target, draft="none", max_new_tokens=48)


def assert_same_up_to_ties(tokens: list[int], row: dict) -> None:
    for at, (got, wanted) in enumerate(zip(tokens, row["tokens"], strict=False)):
        if got != wanted:
            assert row["margins"][at] < TIE, f"{row['prompt'][:60]!r} differs at {at}"
            return
    assert len(tokens) == len(row["tokens"])


def test_logits_equal_transformers(target):
    with np.load(HERE / "golden_smollm2.npz") as golden:
        tokens = jnp.array(golden["tokens"])[None]
        model, size = target.model, tokens.shape[1]
        hidden, _, _ = model.forward(target.params, model.init_cache(1, size), tokens, tree.chain(1, size))
        logits = np.asarray(model.unembed(target.params, hidden))[0]
        bound = 1e-4 * np.ptp(golden["logits"])
        assert np.abs(logits[:, ::97] - golden["logits"]).max() < bound
        assert np.abs(logits[-1] - golden["last"]).max() < bound


def test_the_prompts_are_what_they_should_be():
    """Digits, code and double spaces, where tokenizers go wrong."""
    prompts = [row["prompt"] for row in ROWS]
    assert len(prompts) == 20
    assert sum(any(c.isdigit() for c in p) for p in prompts) >= 8
    assert any("  " in p.strip() for p in prompts) and any("print(" in p or "def " in p for p in prompts)


def test_greedy_ids_equal_transformers(target, plain):
    for row, result in zip(ROWS, plain, strict=True):
        assert (
            target.tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
            )
            == row["prompt_ids"]
        )
        assert_same_up_to_ties(result.tokens, row)


@pytest.mark.slow
def test_ngram_text_equals_plain_text(target, plain):
    """In a batch the rounds are wide, alone they are narrow: each against transformers, and each other."""
    batch = jspec.generate([row["prompt"] for row in ROWS], target=target, max_new_tokens=48)
    for row, one, other in zip(ROWS, plain, batch, strict=True):
        assert_same_up_to_ties(other.tokens, row)
        if min(row["margins"]) > TIE:
            assert other.tokens == one.tokens and one.text == other.text
    assert sum(r.metrics.num_accepted_tokens for r in batch) > 0
    alone = jspec.generate(ROWS[0]["prompt"], target=target, max_new_tokens=48)
    assert_same_up_to_ties(alone.tokens, ROWS[0])
