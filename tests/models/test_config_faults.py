"""Each wrong type and range in each field of each family: a model or a `JspecError`, and no text of noise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from jspec.models import FAMILIES
from jspec.models.config import ConfigError, Reader
from tests.models import faults

GOLDEN = Path(__file__).parent / "golden"
CASES = ["tied", "mistral", "qwen2_window", "qwen3_window", "gemma3", "gemma3_ropes"]
ROPES = ["linear_rope", "llama3_rope", "yarn_settings", "longrope_long", "dynamic"]


def config_of(case, **changes):
    config = json.loads((GOLDEN / case / "config.json").read_text())
    return {key: value for key, value in (config | changes).items() if value is not ...}


def read(config):
    """The config of a model, whose description is made too: it must not be endless."""
    family = FAMILIES[config["model_type"]]
    result = family.from_hf(config)
    family.weights(result)
    assert all(math.isfinite(x) for x in (result.norm_eps, result.rope.theta, result.rope.factor))
    return result


def without_type(config):
    """The kind of model is what finds the family: it stays."""
    kind = config.pop("model_type")
    return lambda rest: read({**rest, "model_type": kind}), config


@pytest.mark.parametrize("case", CASES)
def test_every_field_of_every_family(case, monkeypatch):
    assert faults.check(monkeypatch, *without_type(config_of(case))) > 14


@pytest.mark.parametrize("case", ROPES)
def test_every_field_in_the_words_of_transformers_4(case, monkeypatch):
    """RoPE as ``rope_theta`` and ``rope_scaling``."""
    config = config_of(case)
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    config["original_max_position_embeddings"] = 16
    assert faults.check(monkeypatch, *without_type(config)) > 14


@pytest.mark.parametrize(
    ("case", "rope", "message"),
    [
        ("llama3_rope", dict(factor=None), "rope_parameters.factor = null should be a positive number"),
        ("llama3_rope", dict(factor="two"), 'rope_parameters.factor = "two" should be a positive number'),
        ("llama3_rope", dict(factor=0), "rope_parameters.factor = 0 should be a positive number"),
        ("llama3_rope", dict(factor=True), "rope_parameters.factor = true should be a positive number"),
        (
            "llama3_rope",
            dict(low_freq_factor=4.0),
            "rope_parameters.low_freq_factor = 4.0 should be less than high_freq_factor = 4.0",
        ),
        ("llama3_rope", dict(low_freq_factor=9), "low_freq_factor = 9 should be less than high_freq_factor"),
        (
            "llama3_rope",
            dict(original_max_position_embeddings=None),
            "rope_parameters.original_max_position_embeddings = null should be a positive integer",
        ),
        ("llama3_rope", dict(beta_fast=3.0), "rope_parameters.beta_fast = 3.0 changes the maths"),
        ("yarn", dict(beta_fast=0.5), "rope_parameters.beta_fast = 0.5 should be at least beta_slow = 1.0"),
        ("yarn", dict(rope_theta=1.0), "rope_theta = 1 should be above 1"),
        ("yarn", dict(truncate=None), "rope_parameters.truncate = null should be true or false"),
        ("yarn", dict(factor=...), "config.json has no 'rope_parameters.factor'"),
        ("longrope_long", dict(short_factor=[1.0] * 9), "short_factor = .* should be a list of 10 positive"),
        ("longrope_long", dict(long_factor=[1.0] * 9 + [0]), "long_factor = .* should be a list of 10"),
        ("longrope_long", dict(original_max_position_embeddings=1), "= 1 should be at least 2"),
        ("tied", dict(partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor = 0.5 changes"),
        ("tied", dict(rope_type="default", mrope_section=[2, 1, 1]), "rope_parameters.mrope_section = "),
    ],
)
def test_nested_faults_are_named_with_their_place(case, rope, message):
    config = config_of(case)
    rope = {k: v for k, v in (config["rope_parameters"] | rope).items() if v is not ...}
    with pytest.raises(ConfigError, match=message):
        FAMILIES[config["model_type"]].from_hf(config | {"rope_parameters": rope})


@pytest.mark.parametrize("value", ["linear", ["linear"], 4.0, True])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_settings_that_are_no_object(key, value):
    with pytest.raises(ConfigError, match=f"config.json: {key} = .* should be an object"):
        FAMILIES["llama"].from_hf(config_of("tied", **{key: value}))


def test_true_is_no_neutral_number():
    with pytest.raises(ConfigError, match="logit_scale = true changes the maths"):
        FAMILIES["llama"].from_hf(config_of("tied", logit_scale=True))
    with pytest.raises(ConfigError, match="pretraining_tp = true changes the maths"):
        FAMILIES["llama"].from_hf(config_of("tied", pretraining_tp=True))


def test_an_inner_object_is_checked_for_keys_that_nobody_read():
    read = Reader({"outer": {"inner": {"logit_scale": 2.0}}})
    assert read.nested("outer").nested("inner").get("absent") is None
    with pytest.raises(ConfigError, match=r"outer\.inner\.logit_scale = 2\.0 changes"):
        read.done()
    read = Reader({"outer": {"colour": "red"}})
    read.nested("outer")
    with pytest.warns(UserWarning, match="unknown key 'outer.colour'"):
        read.done()
