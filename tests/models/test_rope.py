"""RoPE settings of config.json: where they may stand, and what depends on the lengths of a model."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.models import FAMILIES
from jspec.models.config import FULL, SLIDING, ConfigError
from jspec.models.rope import Rope
from jspec.weights.load import load_checkpoint
from tests.models.test_config_faults import GOLDEN, config_of
from tests.models.test_golden import assert_close

LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=5000.0)


def read(case, **changes):
    config = config_of(case, **changes)
    return FAMILIES[config["model_type"]].from_hf(config)


def test_dynamic_serves_the_original_length_and_no_more():
    """Up to there the frequencies are the plain ones, in transformers too."""
    rope = dict(rope_type="dynamic", factor=4.0)
    config = read("tied", rope_parameters=rope)
    assert config.context_length == config.rope.original_context_length == 64
    assert read("tied", rope_parameters=rope | {"original_max_position_embeddings": 48}).context_length == 48
    assert read("tied", rope_parameters=rope | {"original_max_position_embeddings": 99}).context_length == 64
    assert read("tied", rope_parameters=rope, original_max_position_embeddings=40).context_length == 40


def test_longrope_takes_its_factors_by_the_context_length():
    settings = config_of("longrope_long")["rope_parameters"]
    for length, factors in ((16, "short_factor"), (17, "long_factor")):
        config = read("longrope_long", max_position_embeddings=length)
        assert config.rope.factors == tuple(settings[factors])
        assert config.context_length == length
    # sqrt(1 + log(4) / log(16)), of 64 positions that were 16
    assert read("longrope_long").rope.attention_factor == pytest.approx(math.sqrt(1.5))
    assert read("longrope_long", max_position_embeddings=16).rope.attention_factor == 1.0
    assert read("longrope_short").rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(8, 48)))
    settings |= {"attention_factor": 1.25}
    assert read("longrope_long", rope_parameters=settings).rope.attention_factor == 1.25


def test_yarn_sharpens_attention_as_its_paper_says():
    assert read("yarn").rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    settings = config_of("yarn")["rope_parameters"]
    for changes, wanted in [
        (dict(factor=0.5), 1.0),
        (dict(mscale=2.0), 0.1 * math.log(4) + 1),  # one of the two alone counts as none
        (dict(mscale=2.0, mscale_all_dim=2.0), 1.0),
        (dict(mscale=2.0, mscale_all_dim=1.0, attention_factor=3), 3.0),
    ]:
        rope = read("yarn", rope_parameters=settings | changes).rope
        assert rope.attention_factor == pytest.approx(wanted), changes


def test_an_original_length_at_the_top_comes_first_and_a_missing_one_is_the_context():
    settings = config_of("llama3_rope")["rope_parameters"]
    outer = dict(original_max_position_embeddings=32)
    assert read("llama3_rope", **outer).rope.original_context_length == 32
    del settings["original_max_position_embeddings"]
    assert read("llama3_rope", rope_parameters=settings).rope.original_context_length == 64


def test_settings_in_two_places_agree_or_are_refused():
    both = dict(rope_scaling=LINEAR, rope_parameters=LINEAR)
    assert read("tied", **both).rope == Rope(5000.0, "linear", 4.0)
    with pytest.raises(ConfigError, match="rope_scaling and rope_parameters ask for different things"):
        read("tied", **both | dict(rope_scaling=LINEAR | {"factor": 2.0}))
    with pytest.raises(ConfigError, match=r"rope_scaling and rope_parameters.full_attention ask for diff"):
        read("gemma3_caps", rope_scaling=LINEAR | {"factor": 2.0})
    with pytest.raises(ConfigError, match=r'rope_scaling.type = "yarn" should be the rope_type, "linear"'):
        read("tied", rope_parameters=..., rope_scaling=LINEAR | {"type": "yarn"})


@pytest.mark.parametrize("case", ["qwen2_window", "qwen3_window"])
def test_each_kind_of_layer_may_have_its_own(case):
    plain = dict(rope_type="default", rope_theta=300.0)
    kinds = config_of(case)["layer_types"]
    assert set(kinds) == {FULL, SLIDING}
    config = read(case, rope_parameters={FULL: LINEAR, SLIDING: plain})
    assert config.rope == Rope(5000.0, "linear", 4.0) and config.window_rope == Rope(300.0)
    assert read(case, rope_parameters=LINEAR).window_rope is None
    with pytest.raises(ConfigError, match=r"has no 'rope_parameters.sliding_attention', .* such layers"):
        read(case, rope_parameters={FULL: LINEAR})
    only = dict(rope_parameters={FULL: LINEAR}, layer_types=[FULL] * 2)
    assert read(case, **only).rope == Rope(5000.0, "linear", 4.0)
    with pytest.raises(ConfigError, match=r"rope_parameters.chunked_attention = .* changes the maths"):
        read(case, rope_parameters={FULL: LINEAR, SLIDING: plain, "chunked_attention": plain})


@pytest.mark.live
@pytest.mark.parametrize(("count", "changes"), [(12, True), (24, False)], ids=["short", "long"])
def test_live_longrope_is_what_transformers_gives_in_one_pass(count, changes):
    """Beyond the original length as it stands; within it, with the config that says so."""
    import torch
    import transformers

    loaded = load_checkpoint(GOLDEN / "longrope_long")
    settings = config_of("longrope_long")["rope_parameters"] | {"factor": 4.0}
    short = read("longrope_long", max_position_embeddings=16, rope_parameters=settings)
    model = loaded.family.make(short if changes else loaded.config)
    tokens = np.load(GOLDEN / "longrope_long" / "golden.npz")["tokens"][:, :count]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "longrope_long").eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    cache = model.init_cache(2, 32)
    hidden, _, _ = jax.jit(model.forward)(loaded.params, cache, jnp.array(tokens), tree.chain(*tokens.shape))
    assert_close(np.asarray(model.unembed(loaded.params, hidden)), wanted)


CHANGES = {
    "yarn_settings": dict(
        factor=3.0, original_context_length=12, attention_factor=1.1, beta_fast=4.0, beta_slow=0.1
    ),
    "longrope_long": dict(attention_factor=1.1, factors=(2.0,) * 10),
    "gemma3_ropes": dict(factor=3.0, attention_factor=1.0, truncate=False),
}


@pytest.mark.parametrize("case", CHANGES)
def test_mutants_of_every_setting(case):
    """Each of them moves the logits away from those of transformers."""
    loaded = load_checkpoint(GOLDEN / case)
    golden = dict(np.load(GOLDEN / case / "golden.npz"))
    tokens = jnp.array(golden["tokens"])
    for name, value in CHANGES[case].items():
        rope = dataclasses.replace(loaded.config.rope, **{name: value})
        assert rope != loaded.config.rope
        model = loaded.family.make(dataclasses.replace(loaded.config, rope=rope))
        cache = model.init_cache(2, 32)
        hidden, _, _ = jax.jit(model.forward)(loaded.params, cache, tokens, tree.chain(*tokens.shape))
        with pytest.raises(AssertionError):
            assert_close(np.asarray(model.unembed(loaded.params, hidden)), golden["logits"])
