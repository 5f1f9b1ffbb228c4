"""Folders of draft heads with random tensors, for the tests of the loaders."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jspec.weights.load import load_checkpoint
from tests.slow_heads import Slow, layer_state, norm_state

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
WIDTH, MLP, VOCAB, LAYERS = 32, 24, 199, 8  # of the golden target of EAGLE-3
SHAPE = (WIDTH, MLP, 4, 2, 12)  # hidden size, MLP, heads, kv heads, head dim
BASE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    hidden_size=WIDTH,
    intermediate_size=MLP,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    num_hidden_layers=1,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    tie_word_embeddings=False,
)


@lru_cache
def target(name="heads/eagle3/target"):
    return load_checkpoint(GOLDEN / name)


def linear(rng, name, out, into):
    return {f"{name}.weight": rng.normal(size=(out, into)) / np.sqrt(into)}


def eagle3(rng, roots=("midlayer",), feature_layers=3, words=96, hidden_size=WIDTH, **layer):
    """Random tensors of an EAGLE-3 head; ``words``: of the draft vocabulary."""
    shape = (hidden_size, *SHAPE[1:])
    state = layer_state(rng, roots[0], *shape, attended=2 * hidden_size, **layer)
    state |= norm_state(rng, f"{roots[0]}.hidden_norm", hidden_size)
    for root in roots[1:]:
        state |= layer_state(rng, root, *shape, **layer)
    for root in roots:
        state |= norm_state(rng, f"{root}.input_layernorm", hidden_size)
    state |= linear(rng, "fc", hidden_size, feature_layers * WIDTH) | norm_state(rng, "norm", hidden_size)
    ids = np.sort(rng.choice(VOCAB, words, replace=False))
    kept = np.isin(np.arange(VOCAB), ids)
    return state | linear(rng, "lm_head", words, hidden_size) | {"d2t": ids - np.arange(words), "t2d": kept}


def eagle1(rng, root="layers.0", fc="fc", fc_bias=True, **layer):
    """Random tensors of an EAGLE head."""
    state = layer_state(rng, root, *SHAPE, **layer) | linear(rng, fc, WIDTH, 2 * WIDTH)
    return state | ({f"{fc}.bias": rng.normal(size=WIDTH)} if fc_bias else {})


def slow(state, *roots, **settings):
    ids = np.arange(len(state["d2t"])) + state["d2t"] if "d2t" in state else None
    return Slow(state, 4, 2, 12, roots, **{"eps": 1e-5, "ids": ids, **settings})


def speculators(kind, layer=BASE, **config):
    layer = {k: v for k, v in layer.items() if k not in ("architectures", "tie_word_embeddings")}
    config = dict(speculators_model_type=kind, transformer_layer_config=layer) | config
    verifier = {"verifier": {"name_or_path": "somebody/target"}}
    return config | dict(speculators_version="0.3.0", speculators_config=verifier, architectures=["Any"])


def nvidia(**config):
    return BASE | dict(architectures=["LlamaForCausalLMEagle3"], eagle_config=config)


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


def owning(rng, state, hidden_size=WIDTH):
    return state | {"embed_tokens.weight": rng.normal(size=(VOCAB, hidden_size))}


def write(folder, config, state, name="model.safetensors"):
    """A head's folder; its floats as float32, or as they are if they are less."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    arrays = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in state.items()}
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, folder / name)
    return folder


# Medusa: names of the blocks and of the heads, in the original files and in vLLM's.
ORIGINAL, VLLM = ("{i}.{j}.linear", "{i}.2"), ("blocks.{i}.layers.{j}", "lm_heads.{i}")
VLLM_CONFIG = dict(model_type="medusa", num_heads=3, num_hidden_layers=2, hidden_size=WIDTH, vocab_size=VOCAB)


def medusa(rng, block, head, heads=3, blocks=2, words=VOCAB, bias=True):
    """Random tensors, each block and head with weights of its own."""
    state = {}
    for i in range(heads):
        state |= linear(rng, head.format(i=i), words, WIDTH)
        for j in range(blocks):
            name = block.format(i=i, j=j)
            state |= linear(rng, name, WIDTH, WIDTH)
            state |= {f"{name}.bias": rng.normal(size=WIDTH)} if bias else {}
    return state
