"""Loading EAGLE's heads: every public format against plain numpy, and what is shared with the target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec import tree
from jspec.weights.heads import load_head
from tests.slow_heads import layer_state, norm_state
from tests.weights.head_files import (
    BASE,
    GOLDEN,
    SHAPE,
    VOCAB,
    WIDTH,
    eagle1,
    eagle3,
    linear,
    nvidia,
    owning,
    slow,
    speculators,
    target,
    without,
    write,
)

# Each case: config.json, the tensors, the same head in numpy, and the feature layers that it should ask for.


def eagle_of_a_mixture(rng):
    """The target's config.json with what that has of experts; biases on q, k and v."""
    state = eagle1(rng, fc_bias=False, biases="qkv")
    config = BASE | dict(bias=False, qkv_bias=True, rope_theta=5e5, num_local_experts=8, sliding_window=4096)
    return config, state, slow(state, "layers.0", theta=5e5, norm=None), (-1,)


def eagle_of_two_layers(rng):
    state = owning(rng, eagle1(rng)) | layer_state(rng, "layers.1", *SHAPE)
    state |= norm_state(rng, "layers.1.input_layernorm", WIDTH)
    config = BASE | dict(num_hidden_layers=2, rope_scaling=dict(type="linear", factor=4.0))
    return config, state, slow(state, "layers.0", "layers.1", factor=4.0, norm=None), (-1,)


def eagle_of_nvidia(rng):
    state = eagle1(rng) | norm_state(rng, "layers.0.input_layernorm", WIDTH) | norm_state(rng, "norm", WIDTH)
    config = nvidia(
        use_aux_hidden_state=False, use_input_layernorm_in_first_layer=True, use_last_layernorm=True
    )
    config["architectures"] = ["LlamaForCausalLMEagle"]
    return config, state, slow(state, "layers.0", recycle_normed=True), (-1,)


def eagle_of_speculators(rng):
    """With all its norms; num_hidden_layers is the target's."""
    state = owning(rng, eagle1(rng, "transformer", "fusion_fc"))
    for name in ("transformer.input_layernorm", "embedding_layernorm", "pre_lm_head_layernorm"):
        state |= norm_state(rng, name, WIDTH)
    config = speculators("eagle", BASE | dict(num_hidden_layers=8), layernorms=True, fusion_bias=True)
    settings = dict(fc="fusion_fc", norm="pre_lm_head_layernorm", embed_norm="embedding_layernorm")
    return config, state, slow(state, "transformer", recycle_normed=True, **settings), (-1,)


def eagle3_of_deepspec(rng):
    """Five feature layers, numbered by the layer they come out of; norms on q and k; the whole vocabulary."""
    state = owning(rng, without(eagle3(rng, ("layers.0",), 5, VOCAB, norms=True), "d2t", "t2d"))
    config = BASE | dict(model_type="qwen3", target_layer_ids=[5, 0, 2, 3, 7], num_target_layers=8)
    return config, state, slow(state, "layers.0", feature_layers=5), (1, 3, 4, 6, 8)


def eagle3_of_nvidia(rng):
    """Two layers, feature layers numbered by the layer they come out of, other norms."""
    state = eagle3(rng, ("midlayer.0", "midlayer.1")) | norm_state(rng, "input_norm", 3 * WIDTH)
    layers = dict(eagle_aux_hidden_state_layer_ids=[6, 0, 4], use_aux_hidden_state=True)
    norms = dict(norm_before_fc=True, return_hidden_post_norm=True, use_last_layernorm=True)
    config = nvidia(**layers, **norms, use_input_layernorm_in_first_layer=True, parallel_draft_step=1)
    config |= dict(num_hidden_layers=2, truncated_vocab_size=96, rope_theta=700.0)
    settings = dict(before_fc="input_norm", recycle_normed=True, theta=700.0)
    return config, state, slow(state, "midlayer.0", "midlayer.1", **settings), (1, 5, 7)


def eagle3_of_nvidia_on_one_feature(rng):
    """No feature layers: the head takes the last state as it is, and has no final norm."""
    state = without(eagle3(rng, ("layers.0",)), "fc.weight", "norm.weight", "t2d")
    config = nvidia(use_aux_hidden_state=False, use_last_layernorm=False, eagle_aux_hidden_state_layer_ids=[])
    config |= dict(draft_vocab_size=96)
    return config, state, slow(state, "layers.0", fc=None, norm=None), (-1,)


def eagle3_of_specforge(rng):
    """Tables of a draft vocabulary that is whole, a bias of fc; 2, L/2 and L - 3 by default."""
    state = eagle3(rng, words=VOCAB) | {"fc.bias": rng.normal(size=WIDTH)}
    config = BASE | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCAB, bias=True)
    return config, state, slow(state, "midlayer"), (2, 4, 5)


def eagle3_with_the_targets_head(rng):
    state = without(eagle3(rng, words=VOCAB), "d2t", "t2d", "lm_head.weight")
    return BASE, state, slow(state, "midlayer"), (2, 4, 5)


def eagle3_with_its_embedding_for_a_head(rng):
    state = without(eagle3(rng, words=VOCAB, hidden_size=24), "d2t", "t2d", "lm_head.weight")
    config = BASE | dict(hidden_size=24, target_hidden_size=WIDTH, tie_word_embeddings=True)
    return config, owning(rng, state, 24), slow(owning(rng, state, 24), "midlayer"), (2, 4, 5)


def eagle3_of_speculators(rng):
    """Keys that older files lack: the norm is before the residual, and sizes are transformers' defaults."""
    state = eagle3(rng, ("layers.0",), biases="qkvo")
    layer = without(BASE, "rms_norm_eps", "hidden_act") | dict(attention_bias=True)
    config = speculators("eagle3", layer, draft_vocab_size=96, eagle_aux_hidden_state_layer_ids=[0, 3, 8])
    return config, state, slow(state, "layers.0", before_residual=True, eps=1e-6), (0, 3, 8)


def eagle3_of_speculators_on_qwen3(rng):
    state = eagle3(rng, ("layers.0", "layers.1"), norms=True, biases="qkv")
    for index in range(3):
        state |= norm_state(rng, f"fc_norm.{index}", WIDTH)
    rope = dict(rope_type="default", rope_theta=1234.0)
    layer = BASE | dict(model_type="qwen3", attention_bias=True, rope_parameters=rope, num_hidden_layers=2)
    config = speculators("eagle3", layer, draft_vocab_size=96, norm_before_residual=False, fc_norm=True)
    settings = dict(before_fc="fc_norm", theta=1234.0)
    return config, state, slow(state, "layers.0", "layers.1", **settings), (2, 4, 5)


FORMATS = [value for name, value in list(globals().items()) if name.startswith(("eagle_of", "eagle3_"))]


def run(loaded, features, tokens, steps=2):
    """Logits of the prompt's rows and of each greedy step, and the drafts, as `Slow.draft` has them.

    Row by row, to compile one program a head; that passes may be wider is shown elsewhere.
    """
    head, params = loaded.head, loaded.params

    @jax.jit
    def step(params, cache, token, stream):
        hidden, stream, cache = head.forward(params, cache, token[None, None], stream, tree.chain(1, 1))
        return head.unembed(params, hidden)[0], stream, head.commit(cache, None, jnp.array([1]))

    fused, cache = head.fuse(params, jnp.array(features, jnp.float32)[None]), head.init_cache(1, 16)
    logits, drafts = [], []
    for index in range(len(tokens) + steps):
        prompt = index < len(tokens)
        stream = fused[:, index : index + 1] if prompt else stream
        token = tokens[index] if prompt else drafts[-1]
        row, stream, cache = step(params, cache, jnp.array(token), stream)
        logits.append(row)
        if index >= len(tokens) - 1:
            best = int(row[0].argmax())
            drafts.append(int(params["ids"][best]) if "ids" in params else best)
    return np.concatenate(logits), drafts


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.__name__)
def test_a_format_is_the_head_that_plain_numpy_makes_of_it(case, tmp_path):
    rng = np.random.default_rng(len(case.__name__))
    config, state, reference, feature_layers = case(rng)
    method = "eagle1" if case.__name__.startswith("eagle_") else "eagle3"
    loaded = load_head(write(tmp_path / "head", config, state), target())
    assert loaded.kind.name == {"eagle1": "eagle"}.get(method, method)
    assert loaded.head.feature_layers == feature_layers
    assert loaded.head.feature_size == len(feature_layers) * WIDTH
    raw = load_file(GOLDEN / "heads/eagle3/target/model.safetensors")
    embed = state.get("embed_tokens.weight", raw["model.embed_tokens.weight"])
    head = raw["lm_head.weight"] if method == "eagle1" else state.get("lm_head.weight", raw["lm_head.weight"])
    head = embed if config.get("tie_word_embeddings") else head
    features, tokens = rng.normal(size=(6, len(feature_layers) * WIDTH)), rng.integers(0, VOCAB, 6)
    wanted, drafts = reference.draft(method, embed, head, features, tokens)
    logits, got = run(loaded, features, tokens)
    assert loaded.head.vocab_size == logits.shape[1] == wanted.shape[1]
    assert np.abs(logits - wanted).max() < 1e-5 * (wanted.max() - wanted.min())
    assert got == drafts


RNG = np.random.default_rng(7)


def test_what_a_format_leaves_out_or_copies_is_the_targets_own_array():
    base = target("heads/eagle1/target")
    params = load_head(GOLDEN / "heads/eagle1/head_bias", base).params
    assert params["embed"] is base.params["embed"]  # the file has a copy
    assert params["head"] is base.params["head"]
    params = load_head(GOLDEN / "heads/eagle3/head", target()).params
    assert params["embed"] is target().params["embed"]  # the file has none
    assert params["ids"].dtype == jnp.int32
    assert params["ids"].shape == (params["head"].shape[1],)


def test_an_embedding_that_differs_is_the_heads_own(tmp_path):
    state = owning(RNG, eagle1(RNG))
    params = load_head(write(tmp_path / "head", BASE, state), target()).params
    np.testing.assert_allclose(params["embed"], state["embed_tokens.weight"], rtol=1e-6)


def test_a_tied_targets_embedding_is_the_heads_head(tmp_path):
    base = target("tied")
    sizes = dict(hidden_size=base.config.hidden_size, vocab_size=base.config.vocab_size)
    state = layer_state(RNG, "layers.0", sizes["hidden_size"], 24, 4, 2, 12)
    state |= linear(RNG, "fc", sizes["hidden_size"], 2 * sizes["hidden_size"])
    loaded = load_head(write(tmp_path / "head", BASE | sizes | dict(bias=False), state), base)
    assert loaded.params["rows"] is loaded.params["embed"] is base.params["embed"]
    hidden = jnp.ones((1, 1, sizes["hidden_size"]))
    np.testing.assert_allclose(
        loaded.head.unembed(loaded.params, hidden)[0, 0], base.params["embed"].sum(1), rtol=1e-4, atol=1e-5
    )


def test_a_head_in_bfloat16():
    """The weights are cast, the target's arrays are not, logits are float32."""
    loaded = load_head(GOLDEN / "heads/eagle3/head", target(), "bfloat16")
    head, params = loaded.head, loaded.params
    assert params["fc"].dtype == jnp.bfloat16 and params["embed"].dtype == jnp.float32
    cache = head.init_cache(1, 8)
    assert cache.layers[0].keys.dtype == jnp.bfloat16
    stream = head.fuse(params, jnp.ones((1, 3, 96), jnp.bfloat16))
    hidden, _, _ = jax.jit(head.forward)(params, cache, jnp.array([[1, 2, 3]]), stream, tree.chain(1, 3))
    logits = head.unembed(params, hidden)
    assert logits.dtype == jnp.float32 and jnp.isfinite(logits).all()
