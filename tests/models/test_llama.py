"""The Llama family against transformers: logits, hidden states, and how a pass may be cut."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import checkpoint, tree
from jspec.models import llama
from jspec.models.config import ConfigError
from jspec.models.llama import FINAL
from tests.models.make_golden import BASE, CASES, make

GOLDEN = Path(__file__).parent / "golden"


def run(folder: Path, taps: tuple[int, ...] = (), pieces: tuple[int, ...] | None = None):
    """Logits and features of the folder's model on its golden tokens, fed in pieces."""
    loaded = checkpoint.load(folder)
    model = llama.make(loaded.config, taps=taps)
    with np.load(folder / "golden.npz") as saved:
        golden = dict(saved)
    batch, length = golden["tokens"].shape
    cache, logits, features = model.init_cache(batch, length + 8), [], []
    start = 0
    for size in pieces or (length,):
        tokens = jnp.array(golden["tokens"][:, start : start + size])
        hidden, tapped, cache = model.forward(loaded.params, cache, tokens, tree.chain(batch, size))
        cache = model.commit(cache, None, jnp.full((batch,), size))
        logits.append(model.unembed(loaded.params, hidden))
        features.append(tapped)
        start += size
    return golden, np.concatenate(logits, axis=1), np.concatenate(features, axis=1)


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Within 1e-4 of the range of the values."""
    assert np.abs(got - wanted).max() < 1e-4 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    golden, logits, _ = run(GOLDEN / case)
    assert_close(logits, golden["logits"])


def test_a_pass_may_be_cut_anywhere():
    golden, logits, _ = run(GOLDEN / "llama3_rope", pieces=(1, 7, 1, 15))
    assert_close(logits, golden["logits"])


def test_taps_are_the_hidden_states_of_transformers():
    golden, _, features = run(GOLDEN / "gqa_untied", taps=(0, 1, FINAL))
    width = BASE["hidden_size"]
    states = np.split(features[:1], [width, 2 * width], axis=-1)
    for got, wanted in zip(states, golden["hidden"], strict=True):
        assert_close(got, wanted)


def test_taps_outside_the_layers_are_refused():
    config = checkpoint.load(GOLDEN / "tied").config
    with pytest.raises(ValueError, match=r"taps \[3\] outside 0..2"):
        llama.make(config, taps=(1, 3))


@pytest.mark.parametrize("case", ["gqa_untied", "llama3_rope", "biases"])
def test_the_golden_comparison_sees_a_changed_model(case):
    """Mutants: a wrong rotation, a wrong scale, a forgotten norm weight move the logits."""
    loaded = checkpoint.load(GOLDEN / case)
    golden = dict(np.load(GOLDEN / case / "golden.npz"))
    config = loaded.config
    rope = config.rope.__class__(**{**config.rope.__dict__, "theta": 9000.0})
    mutants = [
        (config.__class__(**{**config.__dict__, "rope": rope}), loaded.params),
        (config.__class__(**{**config.__dict__, "norm_eps": 1e-2}), loaded.params),
        (config, {**loaded.params, "norm": jnp.ones_like(loaded.params["norm"])}),
    ]
    for mutant, params in mutants:
        model = llama.make(mutant)
        tokens = jnp.array(golden["tokens"])
        hidden, _, _ = model.forward(params, model.init_cache(2, 32), tokens, tree.chain(*tokens.shape))
        with pytest.raises(AssertionError):
            assert_close(np.asarray(model.unembed(params, hidden)), golden["logits"])


def config_of(**changes):
    config = json.loads((GOLDEN / "tied" / "config.json").read_text())
    return {key: value for key, value in (config | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="gelu"), "hidden_act = 'gelu' changes the maths"),
        (dict(sliding_window=4096), "sliding_window = 4096 changes the maths"),
        (dict(quantization_config={"bits": 4}), "quantization_config = .* changes the maths"),
        (dict(num_experts=8), "num_experts = 8 changes the maths"),
        (
            dict(rope_scaling={"type": "yarn", "factor": 4.0}),
            "rope_type = 'yarn' .*default, linear and llama3",
        ),
        (dict(rope_scaling={"type": "llama3", "factor": 4.0}), "has no 'low_freq_factor'"),
        (dict(hidden_size=...), "config.json has no 'hidden_size'"),
        (dict(num_hidden_layers="2"), "num_hidden_layers = '2' should be a positive integer"),
        (dict(num_key_value_heads=3), "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (dict(rms_norm_eps=-1.0), "rms_norm_eps = -1.0 should be a positive number"),
        (dict(tie_word_embeddings="yes"), "tie_word_embeddings = 'yes' should be true or false"),
    ],
)
def test_a_config_that_changes_the_maths_is_named(changes, message):
    rope = {"rope_parameters": ...} if "rope_scaling" in changes else {}
    with pytest.raises(ConfigError, match=message):
        llama.from_hf(config_of(**changes, **rope))


def test_a_key_that_nobody_knows_is_a_warning():
    with pytest.warns(UserWarning, match="unknown key 'colour' = 'red' was not used"):
        llama.from_hf(config_of(colour="red"))


def test_old_and_new_ways_to_write_rope_mean_the_same():
    new = llama.from_hf(
        config_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    )
    old = llama.from_hf(
        config_of(rope_parameters=..., rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    )
    assert new == old


@pytest.mark.live
@pytest.mark.parametrize("case", CASES)
def test_live_logits_equal_transformers(case, tmp_path):
    """The golden folders made anew by the installed transformers and torch."""
    make(case, tmp_path)
    golden, logits, _ = run(tmp_path)
    assert_close(logits, golden["logits"])
    with np.load(GOLDEN / case / "golden.npz") as stored:
        np.testing.assert_allclose(golden["logits"], stored["logits"], rtol=1e-3, atol=1e-4)
