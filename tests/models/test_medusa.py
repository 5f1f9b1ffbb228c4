"""Medusa's heads against their original code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.weights.heads import load_head
from tests.models.test_eagle import GOLDEN, assert_close, target


@pytest.mark.parametrize("case", ["head", "head_2layers"])
def test_the_heads_guess_what_the_original_does(case):
    loaded = load_head(GOLDEN / "medusa" / case, target("eagle1"))
    golden = np.load(GOLDEN / "medusa" / case / "golden.npz")
    heads, features = loaded.head, jnp.array(golden["features"])[None]
    logits = jax.jit(heads.forward)(loaded.params, features)
    assert logits.shape == (1, 12, heads.count, heads.vocab_size)
    assert (heads.count, heads.feature_layers) == ({"head": 5, "head_2layers": 1}[case], (-1,))
    rows = golden["rows"] if "rows" in golden else np.arange(12)
    assert_close(logits[0, rows].swapaxes(0, 1), golden["logits"])


def test_every_block_is_the_one_of_its_index():
    """The original has one block under two names: here the second differs."""
    loaded = load_head(GOLDEN / "medusa" / "head_2layers", target("eagle1"))
    golden = np.load(GOLDEN / "medusa" / "head_2layers" / "golden.npz")
    params = jax.tree.map(np.asarray, loaded.params)
    block, x = params["blocks"][0][1], golden["features"].astype(np.float64)
    block["w"] = block["w"] * 2 + 0.1
    for p in params["blocks"][0]:
        y = x @ p["w"] + p["w_bias"]
        x = x + y / (1 + np.exp(-y))
    logits = loaded.head.forward(jax.tree.map(jnp.asarray, params), jnp.array(golden["features"])[None])
    assert_close(logits[0, :, 0], x @ params["heads"][0]["head"])
    with pytest.raises(AssertionError):
        assert_close(logits[0, :, 0], golden["logits"][0])
