"""Loading Medusa's heads: every format against plain numpy, and what is refused."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.errors import JspecError
from jspec.weights.heads import load_head
from tests.weights.head_files import (
    GOLDEN,
    ORIGINAL,
    VLLM,
    VLLM_CONFIG,
    VOCAB,
    WIDTH,
    medusa,
    target,
    without,
    write,
)

RNG = np.random.default_rng(7)
RAW = load_file(GOLDEN / "heads/eagle3/target/model.safetensors")


def slow_medusa(state, block, head, x, heads=3, blocks=2):
    logits = []
    for i in range(heads):
        y = x
        for j in range(blocks):
            name = block.format(i=i, j=j)
            z = y @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)
            y = y + z / (1 + np.exp(-z))
        logits.append(y @ state[head.format(i=i) + ".weight"].T)
    return np.stack(logits, axis=1)


def prefixed(prefix, names):
    return tuple(prefix + name for name in names)


@pytest.mark.parametrize(
    ("names", "config", "options"),
    [
        (ORIGINAL, dict(medusa_num_heads=2, medusa_num_layers=2, base_model_name_or_path="x"), {}),
        (ORIGINAL, None, {}),
        (prefixed("medusa_heads.", ORIGINAL), None, {}),
        (VLLM, VLLM_CONFIG, dict(bias=False)),
        (prefixed("medusa_heads.", VLLM), VLLM_CONFIG | dict(medusa_fc_bias=True, max_paths=64), {}),
    ],
    ids=["original", "bare", "medusa_heads", "vllm", "vllm prefixed"],
)
def test_medusas_formats(names, config, options, tmp_path):
    state = medusa(RNG, *names, **options)
    name = "medusa_lm_head.safetensors" if names == ORIGINAL else "model.safetensors"
    loaded = load_head(write(tmp_path / "head", config, state, name), target())
    assert (loaded.kind.name, loaded.head.count, loaded.head.vocab_size, loaded.head.feature_layers) == (
        "medusa",
        3,
        VOCAB,
        (-1,),
    )
    x = RNG.normal(size=(4, WIDTH))
    wanted = slow_medusa(state, *names, x)
    got = loaded.head.forward(loaded.params, jnp.array(x, jnp.float32)[None])
    assert np.abs(got[0] - wanted).max() < 1e-5 * np.ptp(wanted)


def test_medusa_inside_a_full_model(tmp_path):
    names = prefixed("medusa_head.", ORIGINAL)
    state = medusa(RNG, *names)
    config = json.loads((GOLDEN / "heads/eagle3/target/config.json").read_text())
    loaded = load_head(write(tmp_path / "model", config, state | RAW), target())
    x = RNG.normal(size=(1, WIDTH))
    got = loaded.head.forward(loaded.params, jnp.array(x, jnp.float32)[None])
    np.testing.assert_allclose(got[0], slow_medusa(state, *names, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [50, VOCAB], ids=["its own rows", "rows for every token"])
def test_medusa_with_a_vocabulary_of_its_own(rows, tmp_path):
    state = medusa(RNG, *VLLM, words=rows, bias=False)
    ids = RNG.permutation(VOCAB)[:50]
    config = VLLM_CONFIG | dict(truncated_vocab_size=50)
    loaded = load_head(write(tmp_path / "head", config, state | {"token_map": ids}), target())
    assert loaded.params["ids"].tolist() == ids.tolist()
    x = RNG.normal(size=(1, WIDTH))
    wanted = slow_medusa(state, *VLLM, x)
    wanted = wanted[..., ids] if rows == VOCAB else wanted
    got = loaded.head.forward(loaded.params, jnp.array(x, jnp.float32)[None])
    assert got.shape == (1, 1, 3, loaded.head.vocab_size) == (1, 1, 3, 50)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [("lm_heads.0.weight",), ()], ids=["its own", "the target's"])
def test_one_head_may_serve_all_of_medusas_blocks(kept, tmp_path):
    state = medusa(RNG, *VLLM, bias=False)
    file = without(state, *({f"lm_heads.{i}.weight" for i in range(3)} - {*kept}))
    config = VLLM_CONFIG | dict(original_lm_head=True)
    loaded = load_head(write(tmp_path / "head", config, file), target())
    one = file.get("lm_heads.0.weight", RAW["lm_head.weight"])
    x = RNG.normal(size=(1, WIDTH))
    wanted = slow_medusa(state | {f"lm_heads.{i}.weight": one for i in range(3)}, *VLLM, x)
    got = loaded.head.forward(loaded.params, jnp.array(x, jnp.float32)[None])
    np.testing.assert_allclose(got[0], wanted, rtol=1e-4, atol=1e-4)
    assert kept or loaded.params["heads"][0]["head"] is target().params["head"]


@pytest.mark.parametrize(
    ("names", "config", "tensors", "message"),
    [
        (ORIGINAL, {}, {"1.1.linear.bias": None}, "missing tensors: 1.1.linear.bias"),
        (ORIGINAL, {}, {"0.2.weight": np.ones((200, WIDTH))}, "a target of 200 tokens, and .* has 199"),
        (ORIGINAL, {}, {"0.0.linear.weight": np.ones((24, 24))}, "features of width 24, and .* width of 32"),
        (ORIGINAL, dict(medusa_num_layers=1), {}, "medusa_num_layers is 1, and its heads have 2"),
        (VLLM, VLLM_CONFIG | dict(num_hidden_layers=3), {}, "num_hidden_layers is 3, and its heads have 2"),
        (VLLM, VLLM_CONFIG | dict(vocab_size=200), {}, "a target of 200 tokens, and .* has 199"),
        (VLLM, VLLM_CONFIG | dict(logit_scale=0.5), {}, "logit_scale = 0.5 changes the maths"),
        (VLLM, VLLM_CONFIG | dict(truncated_vocab_size=9), {}, "has no token_map, .* 9 draft tokens .* 199"),
        (
            VLLM,
            VLLM_CONFIG | dict(truncated_vocab_size=2),
            {"token_map": np.array([3, 3])},
            "token_map maps 2 draft tokens to 1 ids",
        ),
        (
            VLLM,
            VLLM_CONFIG | dict(truncated_vocab_size=2),
            {"token_map": np.array([3, 199])},
            "token_map maps draft token 1 to 199, but the target has 199 tokens",
        ),
    ],
)
def test_medusas_heads_that_do_not_fit_are_refused(names, config, tensors, message, tmp_path):
    state = medusa(RNG, *names, bias=names == ORIGINAL) | tensors
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(JspecError, match=message):
        load_head(write(tmp_path / "head", config, state), target())
