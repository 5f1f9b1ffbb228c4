"""The Llama family: RMSNorm, grouped-query attention with RoPE, a SwiGLU MLP.

Layers are unrolled over per-layer arrays: on a CPU a scan over stacked weights copies
each layer before its product (1.2-2 x slower). `layer` is a function of one layer's
params alone, so a scanned form may be put beside the loop in `make`.

Static: everything in `Config`, the taps, B, T and S. Traced: params, tokens, lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec import cache as kv
from jspec.models.config import ConfigError, Reader
from jspec.models.layers import Rope, Weight, attend, rms_norm, rope_frequencies, rotate
from jspec.types import Model, Params, Tree

FINAL = -1
"""Tap the hidden state after the final norm, which the head reads."""


@dataclass(frozen=True)
class Config:
    """Shapes and constants of a Llama model; the comments give the config.json keys."""

    vocab_size: int
    width: int  # hidden_size
    mlp_width: int  # intermediate_size
    layers: int  # num_hidden_layers
    heads: int  # num_attention_heads
    kv_heads: int  # num_key_value_heads
    channels: int  # head_dim
    max_length: int  # max_position_embeddings
    norm_eps: float = 1e-6  # rms_norm_eps
    rope: Rope = Rope()
    tied: bool = False  # tie_word_embeddings: the head is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False


def from_hf(config: Mapping[str, Any]) -> Config:
    """Read a Hugging Face ``config.json`` of ``model_type: llama``.

    Raises `ConfigError`, naming the key, for a missing or malformed value and for one
    that asks for maths this family does not have.
    """
    read = Reader(config)
    read.require("hidden_act", "silu")
    read.require("pretraining_tp", 1)
    width, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    result = Config(
        vocab_size=read.integer("vocab_size"),
        width=width,
        mlp_width=read.integer("intermediate_size"),
        layers=read.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        channels=read.integer("head_dim", default=width // heads),
        max_length=read.integer("max_position_embeddings", default=2048),
        norm_eps=read.number("rms_norm_eps", default=1e-6),
        rope=read.rope(),
        tied=read.flag("tie_word_embeddings"),
        attention_bias=read.flag("attention_bias"),
        mlp_bias=read.flag("mlp_bias"),
    )
    read.done()
    return result


def weights(config: Config) -> dict[str, Any]:
    """Describe every parameter: a tree of `Weight` with the structure of the params."""
    width, vocab = config.width, config.vocab_size
    query, kv_width = config.heads * config.channels, config.kv_heads * config.channels

    def norm(source: str) -> Weight:
        return Weight((width,), ("embed",), f"{source}.weight")

    def linear(tree: dict, name: str, source: str, shape, axes, bias: bool) -> None:
        tree[name] = Weight(shape, axes, f"{source}.weight", transpose=True)
        if bias:
            tree[f"{name}_bias"] = Weight(shape[1:], axes[1:], f"{source}.bias")

    def one_layer(index: int) -> dict[str, Weight]:
        root, bias, mlp = f"model.layers.{index}", config.attention_bias, config.mlp_bias
        tree = {
            "attn_norm": norm(f"{root}.input_layernorm"),
            "mlp_norm": norm(f"{root}.post_attention_layernorm"),
        }
        attn, ffn = f"{root}.self_attn", f"{root}.mlp"
        linear(tree, "q", f"{attn}.q_proj", (width, query), ("embed", "heads"), bias)
        linear(tree, "k", f"{attn}.k_proj", (width, kv_width), ("embed", "kv_heads"), bias)
        linear(tree, "v", f"{attn}.v_proj", (width, kv_width), ("embed", "kv_heads"), bias)
        linear(tree, "o", f"{attn}.o_proj", (query, width), ("heads", "embed"), bias)
        linear(tree, "gate", f"{ffn}.gate_proj", (width, config.mlp_width), ("embed", "mlp"), mlp)
        linear(tree, "up", f"{ffn}.up_proj", (width, config.mlp_width), ("embed", "mlp"), mlp)
        linear(tree, "down", f"{ffn}.down_proj", (config.mlp_width, width), ("mlp", "embed"), mlp)
        return tree

    tree: dict[str, Any] = {
        "embed": Weight((vocab, width), ("vocab", "embed"), "model.embed_tokens.weight"),
        "layers": [one_layer(i) for i in range(config.layers)],
        "norm": norm("model.norm"),
    }
    if not config.tied:
        tree["head"] = Weight((width, vocab), ("embed", "vocab"), "lm_head.weight", transpose=True)
    return tree


def project(p: Params, name: str, x: Array) -> Array:
    """``x @ w``, plus the bias where the checkpoint has one."""
    out = x @ p[name]
    return out + p[f"{name}_bias"] if f"{name}_bias" in p else out


def layer(
    config: Config, p: Params, x: Array, position: Array, write: Callable, attention: Callable
) -> tuple[Array, Any]:
    """One decoder layer on [B, T, D]; ``write`` puts K and V in the cache and returns it."""
    batch, rows, _ = x.shape
    frequency = rope_frequencies(config.rope, config.channels)

    def heads(name: str, count: int) -> Array:
        return project(p, name, normed).reshape(batch, rows, count, config.channels)

    normed = rms_norm(x, p["attn_norm"], config.norm_eps)
    query = rotate(heads("q", config.heads), position, frequency)
    key = rotate(heads("k", config.kv_heads), position, frequency)
    entry = write(key, heads("v", config.kv_heads))
    mixed = attention(query, entry).reshape(batch, rows, config.heads * config.channels)
    x = x + project(p, "o", mixed)
    normed = rms_norm(x, p["mlp_norm"], config.norm_eps)
    hidden = jax.nn.silu(project(p, "gate", normed)) * project(p, "up", normed)
    return x + project(p, "down", hidden), entry


def make(
    config: Config,
    *,
    taps: tuple[int, ...] = (),
    dtype: jax.typing.DTypeLike = jnp.float32,
    attend: Callable = attend,
) -> Model:
    """Build the `Model` of a config.

    ``taps``: which residual streams become the features, concatenated in this order;
    k means the stream after k layers (Hugging Face's ``hidden_states[k]``), `FINAL` the
    state after the final norm. ``dtype`` is the cache's; params bring their own.
    ``attend`` has the signature of `jspec.models.layers.attend`.
    """
    if bad := [t for t in taps if not FINAL <= t <= config.layers]:
        raise ValueError(f"taps {bad} outside 0..{config.layers} (or {FINAL}, after the final norm)")
    scale = config.channels**-0.5

    def init_cache(batch: int, slots: int) -> kv.Cache:
        return kv.init(config.layers, batch, config.kv_heads, slots, config.channels, dtype)

    def forward(params: Params, cache: kv.Cache, tokens: Array, tree: Tree):
        position = cache.length[:, None] + tree.depth
        x = params["embed"][tokens]
        streams, entries = {0: x}, []
        for index, (p, entry) in enumerate(zip(params["layers"], cache.layers, strict=True)):

            def write(key, value, entry=entry):
                return kv.write(entry, key, value, cache.length)

            def attention(query, entry):
                return attend(query, *entry, cache.length, tree.mask, scale)

            x, entry = layer(config, p, x, position, write, attention)
            streams[index + 1] = x
            entries.append(entry)
        hidden = streams[FINAL] = rms_norm(x, params["norm"], config.norm_eps)
        tapped = [streams[t] for t in taps] or [hidden[..., :0]]
        return hidden, jnp.concatenate(tapped, axis=-1), cache._replace(layers=tuple(entries))

    def unembed(params: Params, hidden: Array) -> Array:
        if config.tied:
            return jnp.einsum("btd,vd->btv", hidden, params["embed"], preferred_element_type=jnp.float32)
        return jnp.einsum("btd,dv->btv", hidden, params["head"], preferred_element_type=jnp.float32)

    return Model(
        init_cache=init_cache,
        forward=forward,
        commit=kv.commit,
        unembed=unembed,
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        feature_width=len(taps) * config.width,
    )
