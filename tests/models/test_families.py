"""config.json of the families beside Llama: what is read, what a missing key means, what is refused."""

import json
from pathlib import Path

import pytest

from jspec.models import FAMILIES, gemma3, mistral, qwen2, qwen3
from jspec.models.config import ConfigError
from jspec.models.rope import Rope

GOLDEN = Path(__file__).parent / "golden"


def config_of(case, **changes):
    config = json.loads((GOLDEN / case / "config.json").read_text())
    return {key: value for key, value in (config | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mistral", dict(hidden_act="gelu"), 'hidden_act = "gelu" changes the maths'),
        ("mistral", dict(attention_bias=True), "attention_bias = true changes the maths"),
        ("mistral", dict(sliding_window=0), "sliding_window = 0 should be a positive integer"),
        ("mistral", dict(layer_types=["full_attention"] * 2), "layer_types = .* changes the maths"),
        ("qwen2", dict(attn_logit_softcapping=30.0), "attn_logit_softcapping = 30.0 changes the maths"),
        ("qwen2", dict(max_window_layers=-1), "max_window_layers = -1 should be an integer of at least 0"),
        ("qwen2", dict(use_sliding_window="yes"), 'use_sliding_window = "yes" should be true or false'),
        (
            "qwen2",
            dict(layer_types=["sliding_attention"] * 2),
            "layers of sliding_attention, but no sliding_w",
        ),
        ("qwen2_window", dict(layer_types=["full_attention"]), "layer_types = .* list that names 2 layers"),
        ("qwen3", dict(num_experts=8), "num_experts = 8 changes the maths"),
        ("qwen3", dict(rope_parameters={"type": "mrope"}), 'rope_parameters.type = "mrope" changes'),
        (
            "qwen3_window",
            dict(layer_types=["linear_attention"] * 2),
            'layer_types = "linear_attention" changes',
        ),
        ("gemma3", dict(hidden_activation="gelu"), 'hidden_activation = "gelu" changes the maths'),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention = true changes"),
        ("gemma3", dict(final_logit_softcapping=-1.0), "final_logit_softcapping = -1.0 should be a positive"),
        (
            "gemma3",
            dict(query_pre_attn_scalar="a"),
            'query_pre_attn_scalar = "a" should be a positive number',
        ),
        ("gemma3", dict(rope_parameters={"rope_theta": 1e6}), "rope_parameters.rope_theta = .* changes"),
        (
            "gemma3",
            dict(rope_parameters={"full_attention": 1e6}),
            "rope_parameters.full_attention = 1000000.0 should be an object",
        ),
    ],
)
def test_a_config_that_changes_the_maths_is_named(case, changes, message):
    config = config_of(case, **changes)
    with pytest.raises(ConfigError, match=message):
        FAMILIES[config["model_type"]].from_hf(config)


def test_a_missing_window_is_what_transformers_takes_and_null_is_none():
    assert mistral.from_hf(config_of("mistral", sliding_window=...)).windows == (4096, 4096)
    assert mistral.from_hf(config_of("mistral", sliding_window=None)).windows == ()


def test_qwen_windows_its_upper_layers_where_asked():
    for case, family in (("qwen2_window", qwen2), ("qwen3_window", qwen3)):
        upper = dict(layer_types=..., sliding_window=9, max_window_layers=1)
        assert family.from_hf(config_of(case, **upper)).windows == (None, 9)
        assert family.from_hf(config_of(case, **upper, use_sliding_window=...)).windows == ()
        assert family.from_hf(config_of(case, **upper | dict(max_window_layers=2))).windows == ()
        assert family.from_hf(config_of(case, **upper | dict(max_window_layers=0))).windows == (9, 9)


def test_qwen3_heads_are_128_wide_where_nothing_is_said():
    assert qwen3.from_hf(config_of("qwen3", head_dim=...)).head_dim == 128


def test_gemma3_in_the_words_of_transformers_4():
    """Flat RoPE keys and a pattern of layers, as the checkpoints of 2025 have them."""
    flat = dict(
        rope_theta=5000.0, rope_local_base_freq=300.0, rope_scaling={"rope_type": "linear", "factor": 4.0}
    )
    new = gemma3.from_hf(config_of("gemma3_caps"))
    old = gemma3.from_hf(config_of("gemma3_caps", rope_parameters=..., **flat))
    assert old == new and new.window_rope == Rope(300.0)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        named = dict(layer_types=..., sliding_window_pattern=..., _sliding_window_pattern=...) | {key: 3}
        assert gemma3.from_hf(config_of("gemma3", **named)).windows == (5, 5, None)


def test_gemma3_where_nothing_is_said():
    silent = ("rope_parameters", "query_pre_attn_scalar", "tie_word_embeddings", "head_dim")
    config = gemma3.from_hf(config_of("gemma3", **dict.fromkeys(silent, ...)))
    assert (config.rope.theta, config.window_rope.theta) == (1e6, 1e4)
    assert config.scale == 1 / 16 and config.tied and config.head_dim == 256
