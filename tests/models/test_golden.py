"""Every family against transformers: logits, hidden states, how a pass may be cut, and rings."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.errors import JspecError
from jspec.models.decoder import FINAL, join_qkv
from jspec.models.layers import rms_norm
from jspec.weights.load import load_checkpoint
from tests.models.make_golden import CASES, MODELS, make

GOLDEN = Path(__file__).parent / "golden"
WINDOWED = [name for name, case in MODELS.items() if case.get("sliding_window")]


def run(
    folder: Path,
    feature_layers: tuple[int, ...] = (),
    pieces: tuple[int, ...] | None = None,
    scratch=None,
    joined: bool = False,
):
    """Logits and features of the folder's model on its golden tokens, fed in pieces."""
    loaded = load_checkpoint(folder)
    config, weights = loaded.config, loaded.params
    if joined:
        config, weights = join_qkv(config, weights)
    model = loaded.family.make(config, feature_layers=feature_layers)
    with np.load(folder / "golden.npz") as saved:
        golden = dict(saved)
    batch, length = golden["tokens"].shape
    cache, logits, features = model.init_cache(batch, length + 8, scratch), [], []
    forward, unembed = jax.jit(model.forward), jax.jit(model.unembed)
    start = 0
    for size in pieces or (length,):
        tokens = jnp.array(golden["tokens"][:, start : start + size])
        hidden, taken, cache = forward(weights, cache, tokens, tree.chain(batch, size))
        cache = model.commit(cache, None, jnp.full((batch,), size))
        logits.append(unembed(weights, hidden))
        features.append(taken)
        start += size
    sizes = [entry.keys.shape[2] for entry in cache.layers]
    if scratch is not None:
        windows = [loaded.config.window(index) for index in range(loaded.config.layers)]
        assert sizes == [length + 8 if w is None else w - 1 + max(scratch, 2) for w in windows]
    return golden, np.concatenate(logits, axis=1), np.concatenate(features, axis=1)


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Within 1e-4 of the range of the values."""
    assert np.abs(got - wanted).max() < 1e-4 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    golden, logits, _ = run(GOLDEN / case)
    assert_close(logits, golden["logits"])


@pytest.mark.parametrize("case", ["gqa_untied", "qwen2", "qwen3"])
def test_q_k_and_v_may_be_one_matrix(case):
    """With their biases and their norms, where a family has them."""
    golden, logits, _ = run(GOLDEN / case, joined=True)
    assert_close(logits, golden["logits"])


@pytest.mark.parametrize("case", ["llama3_rope", "longrope_long", "gemma3_ropes", *WINDOWED])
def test_a_pass_may_be_cut_anywhere(case):
    golden, logits, _ = run(GOLDEN / case, pieces=(1, 7, 1, 15))
    assert_close(logits, golden["logits"])


@pytest.mark.parametrize("pieces", [(3, 1, 2) * 4, (1,) * 24, (7, 7, 7, 3)], ids=["mixed", "ones", "wide"])
@pytest.mark.parametrize("case", WINDOWED)
def test_a_ring_that_wraps_gives_the_same_logits(case, pieces):
    golden, logits, _ = run(GOLDEN / case, pieces=pieces, scratch=max(pieces))
    assert_close(logits, golden["logits"])


@pytest.mark.parametrize("case", CASES)
def test_feature_layers_are_the_hidden_states_of_transformers(case):
    layers = load_checkpoint(GOLDEN / case).config.layers
    golden, _, features = run(GOLDEN / case, feature_layers=(*range(layers), FINAL))
    states = np.split(features[:1], layers + 1, axis=-1)
    for got, wanted in zip(states, golden["hidden"], strict=True):
        assert_close(got, wanted)


def test_feature_layers_outside_the_layers_are_refused():
    loaded = load_checkpoint(GOLDEN / "tied")
    with pytest.raises(JspecError, match=r"feature layers \[3\] outside 0..2"):
        loaded.family.make(loaded.config, feature_layers=(1, 3))


def one_wider(windows):
    return tuple(w and w + 1 for w in windows)


# Mutants: a value of the config that is read wrongly moves the logits of every case that has it.
CHANGES = {
    "rope": lambda config: dict(rope=dataclasses.replace(config.rope, theta=9000.0)),
    "norm_eps": lambda config: dict(norm_eps=1e-2),
    "windows": lambda config: dict(windows=one_wider(config.windows)),
    "no windows": lambda config: dict(windows=()),
    "window_rope": lambda config: dict(window_rope=None),
    "scale": lambda config: dict(scale=None),
    "embed_scale": lambda config: dict(embed_scale=1.0),
    "attention_softcap": lambda config: dict(attention_softcap=None),
    "final_softcap": lambda config: dict(final_softcap=None),
    "activation": lambda config: dict(activation=dataclasses.fields(type(config))[-2].default),
    "norm": lambda config: dict(norm=rms_norm),
}


@pytest.mark.parametrize(
    "case", ["gqa_untied", "llama3_rope", "biases", "mistral", "qwen2_window", "gemma3_caps"]
)
def test_the_golden_comparison_sees_a_changed_model(case):
    loaded = load_checkpoint(GOLDEN / case)
    golden = dict(np.load(GOLDEN / case / "golden.npz"))
    tokens, config = jnp.array(golden["tokens"]), loaded.config
    mutants = [(dataclasses.replace(config, **change(config)), loaded.params) for change in CHANGES.values()]
    forgotten = {**loaded.params, "norm": jnp.ones_like(loaded.params["norm"])}
    changed = [(c, p) for c, p in [*mutants, (config, forgotten)] if c != config or p is forgotten]
    assert len(changed) >= (len(CHANGES) + 1 if case == "gemma3_caps" else 3)
    for mutant, params in changed:
        model = loaded.family.make(mutant)
        hidden, _, _ = jax.jit(model.forward)(
            params, model.init_cache(2, 32), tokens, tree.chain(*tokens.shape)
        )
        with pytest.raises(AssertionError):
            assert_close(np.asarray(model.unembed(params, hidden)), golden["logits"])


@pytest.mark.live
@pytest.mark.parametrize("case", CASES)
def test_live_logits_equal_transformers(case, tmp_path):
    """The golden folders made anew by the installed transformers and torch."""
    make(case, tmp_path)
    golden, logits, _ = run(tmp_path)
    assert_close(logits, golden["logits"])
    with np.load(GOLDEN / case / "golden.npz") as stored:
        np.testing.assert_allclose(golden["logits"], stored["logits"], rtol=1e-3, atol=1e-4)
