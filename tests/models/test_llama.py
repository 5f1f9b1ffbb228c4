"""The Llama family's config.json: what changes the maths is named, what is unknown is a warning."""

import json
from pathlib import Path

import pytest

from jspec.models import llama
from jspec.models.config import ConfigError

GOLDEN = Path(__file__).parent / "golden"


def config_of(**changes):
    config = json.loads((GOLDEN / "tied" / "config.json").read_text())
    return {key: value for key, value in (config | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="gelu"), 'hidden_act = "gelu" changes the maths'),
        (dict(sliding_window=4096), "sliding_window = 4096 changes the maths"),
        (dict(quantization_config={"bits": 4}), "quantization_config = .* changes the maths"),
        (dict(num_experts=8), "num_experts = 8 changes the maths"),
        (
            dict(rope_scaling={"type": "su", "factor": 4.0}),
            'rope_scaling.type = "su" changes .*default, linear, dynamic, llama3, yarn, longrope are',
        ),
        (
            dict(rope_scaling={"type": "llama3", "factor": 4.0}),
            "has no 'rope_scaling.low_freq_factor', which should be a positive number",
        ),
        (dict(compression_config={"format": "int4"}), "compression_config = .* changes the maths"),
        (dict(head_dim=7), "head_dim 7 should be even"),
        (dict(hidden_size=...), "config.json has no 'hidden_size'"),
        (dict(num_hidden_layers="2"), 'num_hidden_layers = "2" should be a whole number from 1 to 10000'),
        (dict(num_key_value_heads=3), "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (dict(rms_norm_eps=-1.0), "rms_norm_eps = -1.0 should be a positive number"),
        (dict(tie_word_embeddings="yes"), 'tie_word_embeddings = "yes" should be true or false'),
    ],
)
def test_a_config_that_changes_the_maths_is_named(changes, message):
    rope = {"rope_parameters": ...} if "rope_scaling" in changes else {}
    with pytest.raises(ConfigError, match=message):
        llama.from_hf(config_of(**changes, **rope))


def test_a_key_that_nobody_knows_is_a_warning():
    with pytest.warns(UserWarning, match="unknown key 'colour' = \"red\" was not used"):
        llama.from_hf(config_of(colour="red"))


def test_old_and_new_ways_to_write_rope_mean_the_same():
    new = llama.from_hf(
        config_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    )
    old = llama.from_hf(
        config_of(rope_parameters=..., rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    )
    assert new == old
