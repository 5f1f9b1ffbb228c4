"""q, k and v as one matrix, as targets on a CPU have them: the params fit their description and any file."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jspec
from jspec.models.decoder import join_qkv
from jspec.weights.base import load_params, stored_weights
from jspec.weights.huggingface import SafetensorsFolder, save_params
from jspec.weights.load import load_checkpoint
from tests import tiny
from tests.models.test_golden import GOLDEN


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_loaded_targets_params_have_the_tree_of_its_weights(tmp_path):
    target = jspec.load(str(tiny.folder(tmp_path / "m")))
    config = target.checkpoint.config
    assert config.joined_qkv == (jax.default_backend() == "cpu")
    weights = target.checkpoint.family.weights(config)
    assert jax.tree.structure(target.params) == jax.tree.structure(weights)
    assert target.params is target.checkpoint.params
    for weight, array in zip(jax.tree.leaves(weights), jax.tree.leaves(target.params), strict=True):
        assert weight.shape == array.shape and len(weight.axes) == array.ndim


@pytest.mark.parametrize("case", ["gqa_untied", "qwen2", "qwen3", "gemma3"])
def test_joined_params_are_written_and_read_as_the_same_model(case, tmp_path):
    """With biases and norms of heads, where a family has them."""
    loaded = load_checkpoint(GOLDEN / case)
    config, params = join_qkv(loaded.config, loaded.params)
    weights = loaded.family.weights(config)
    assert "qkv" in params["layers"][0] and "q" not in params["layers"][0]
    assert {w.source for w in stored_weights(weights)} == set(SafetensorsFolder(GOLDEN / case).tensors)
    save_params(tmp_path / "m", loaded.json, params, weights)
    again = load_checkpoint(tmp_path / "m")
    assert again.config == loaded.config
    same(again.params, loaded.params)
    # A file may be read into the joined form at once.
    same(load_params(weights, SafetensorsFolder(tmp_path / "m")), params)
