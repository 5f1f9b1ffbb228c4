"""The decoder that the families share: RMSNorm, grouped-query attention with RoPE, a gated MLP.

A family is a reading of config.json (`jspec.models.llama` and its neighbours); what
differs between families is a value in `Config`, and every value is off by default, as in
Llama. One description of the weights, one layer, one `make` serve them all.

Layers are unrolled over per-layer arrays: on a CPU a scan over stacked weights copies
each layer before its product (1.2-2 x slower). `layer` is a function of one layer's
params alone, so a scanned form may be put beside the loop in `make`.

Static: everything in `Config`, the feature layers, B, T and S. Traced: params, tokens, lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.cache import dense
from jspec.errors import JspecError
from jspec.models.config import MOST_LAYERS, ConfigError, Reader
from jspec.models.layers import Weight, attend, rms_norm, soft_cap
from jspec.models.rope import Rope, rope_frequencies, rotate
from jspec.once import built_once
from jspec.tree import earlier_rows
from jspec.types import Model, Params, Tree

FINAL = -1
"""The feature layer that is the state after the final norm, which the head reads."""


@dataclass(frozen=True)
class Config:
    """Shapes and constants of a decoder; the comments give the config.json keys."""

    vocab_size: int
    hidden_size: int  # hidden_size
    intermediate_size: int  # intermediate_size
    layers: int  # num_hidden_layers
    heads: int  # num_attention_heads
    kv_heads: int  # num_key_value_heads
    head_dim: int  # head_dim
    context_length: int  # max_position_embeddings
    norm_eps: float = 1e-6  # rms_norm_eps
    rope: Rope = Rope()
    tied: bool = False  # tie_word_embeddings: the head is the embedding
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    head_norms: bool = False  # q and k are normalised head by head
    post_norms: bool = False  # attention and MLP are normalised before they are added
    windows: tuple[int | None, ...] = ()  # how many positions each layer sees; (): all see all
    window_rope: Rope | None = None  # of the layers with a window, where it differs
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    embed_scale: float = 1.0
    attention_softcap: float | None = None  # attn_logit_softcapping
    final_softcap: float | None = None  # final_logit_softcapping
    joined_qkv: bool = False  # q, k and v are one matrix (`join_qkv`)
    activation: Callable[[Array], Array] = jax.nn.silu
    norm: Callable[[Array, Array, float], Array] = rms_norm

    def window(self, layer: int) -> int | None:
        """How many positions a layer sees, its own included; None: all."""
        return self.windows[layer] if self.windows else None


def shapes(read: Reader, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` that all families read from the same keys of config.json.

    ``defaults``: what a missing key means in the family, but for the sizes of its tensors,
    which have to be there. Raises `ConfigError`.
    """
    hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    # null means as many as there are heads, which a missing key need not
    silent = defaults.get("num_key_value_heads", heads)
    kv_heads = read.integer("num_key_value_heads", heads if "num_key_value_heads" in read.config else silent)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = read.integer("head_dim", defaults.get("head_dim", hidden_size // heads))
    if head_dim % 2 or head_dim == 0:
        raise ConfigError(f"config.json: head_dim {head_dim} should be even: RoPE turns pairs of channels")
    return dict(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        layers=read.integer("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=read.integer("max_position_embeddings", defaults["max_position_embeddings"]),
        norm_eps=read.number("rms_norm_eps", default=1e-6),
        tied=read.flag("tie_word_embeddings", defaults.get("tie_word_embeddings", False)),
    )


def weights(config: Config) -> dict[str, Any]:
    """Describe every parameter: a tree of `Weight` with the structure of the params."""
    hidden_size, vocab = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": Weight((vocab, hidden_size), ("vocab", "embed"), "model.embed_tokens.weight"),
        "layers": [layer_weights(config, f"model.layers.{i}") for i in range(config.layers)],
        "norm": norm_weight(hidden_size, "embed", "model.norm"),
    }
    if not config.tied:
        tree["head"] = Weight((hidden_size, vocab), ("embed", "vocab"), "lm_head.weight", transpose=True)
    return tree


def layer_weights(config: Config, root: str, attended: int | None = None) -> dict[str, Weight]:
    """Describe one layer, whose tensors have names that begin with ``root``.

    ``attended``: the width of what q, k and v read, where it is not the stream's.
    """
    hidden_size, intermediate_size, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    seen = attended or hidden_size
    query, kv_width = config.heads * head_dim, config.kv_heads * head_dim
    attn, mlp, bias = f"{root}.self_attn", f"{root}.mlp", config.attention_bias
    before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    tree = {
        "attn_norm": norm_weight(hidden_size, "embed", f"{root}.input_layernorm"),
        "mlp_norm": norm_weight(hidden_size, "embed", f"{root}.{before_mlp}"),
        **linear_weights("q", f"{attn}.q_proj", (seen, query), ("embed", "heads"), bias),
        **linear_weights("k", f"{attn}.k_proj", (seen, kv_width), ("embed", "kv_heads"), bias),
        **linear_weights("v", f"{attn}.v_proj", (seen, kv_width), ("embed", "kv_heads"), bias),
        **linear_weights("o", f"{attn}.o_proj", (query, hidden_size), ("heads", "embed"), config.output_bias),
        **linear_weights(
            "gate", f"{mlp}.gate_proj", (hidden_size, intermediate_size), ("embed", "mlp"), config.mlp_bias
        ),
        **linear_weights(
            "up", f"{mlp}.up_proj", (hidden_size, intermediate_size), ("embed", "mlp"), config.mlp_bias
        ),
        **linear_weights(
            "down", f"{mlp}.down_proj", (intermediate_size, hidden_size), ("mlp", "embed"), config.mlp_bias
        ),
    }
    if config.joined_qkv:
        for name in ("", "_bias") if bias else ("",):
            parts = tuple(tree.pop(f"{one}{name}") for one in "qkv")
            shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
            tree[f"qkv{name}"] = Weight(shape, (*parts[0].axes[:-1], "qkv"), "", parts=parts)
    if config.head_norms:
        tree["q_norm"] = norm_weight(head_dim, "head_dim", f"{attn}.q_norm")
        tree["k_norm"] = norm_weight(head_dim, "head_dim", f"{attn}.k_norm")
    if config.post_norms:
        tree["attn_post_norm"] = norm_weight(hidden_size, "embed", f"{root}.post_attention_layernorm")
        tree["mlp_post_norm"] = norm_weight(hidden_size, "embed", f"{root}.post_feedforward_layernorm")
    return tree


def norm_weight(size: int, axis: str, source: str) -> Weight:
    """Describe the weight of a norm."""
    return Weight((size,), (axis,), f"{source}.weight")


def linear_weights(
    name: str, source: str, shape: tuple[int, int], axes: tuple[str, str], bias: bool
) -> dict[str, Weight]:
    """Describe a linear map ``name``, and its ``name_bias`` where it has one."""
    tree = {name: Weight(shape, axes, f"{source}.weight", transpose=True)}
    if bias:
        tree[f"{name}_bias"] = Weight(shape[1:], axes[1:], f"{source}.bias")
    return tree


def project(p: Params, name: str, x: Array) -> Array:
    """``x @ w``, plus the bias where the checkpoint has one."""
    out = x @ p[name]
    return out + p[f"{name}_bias"] if f"{name}_bias" in p else out


def join_qkv(config: Config, params: Params) -> tuple[Config, Params]:
    """The same model with q, k and v of each layer as one matrix, ``qkv`` [D, (H + 2K)·C].

    XLA on CPU runs small products one a thread; one wide product uses them all. Sharded
    params stay apart: their heads lie on different devices.
    """

    def join(p: Params) -> Params:
        names = [("qkv", "q", "k", "v"), ("qkv_bias", "q_bias", "k_bias", "v_bias")]
        joined = {new: jnp.concatenate([p[n] for n in old], axis=-1) for new, *old in names if old[0] in p}
        apart = {n for _, *old in names for n in old}
        return joined | {name: weight for name, weight in p.items() if name not in apart}

    return replace(config, joined_qkv=True), {**params, "layers": [join(p) for p in params["layers"]]}


def layer(
    config: Config,
    p: Params,
    x: Array,
    position: Array,
    write: Callable,
    attention: Callable,
    rope: Rope | None = None,
    attended: Array | None = None,
) -> tuple[Array, Any]:
    """One decoder layer on [B, T, D]; ``write`` puts K and V in the cache and returns it.

    ``rope``: this layer's, where it is not the config's. ``attended``: what q, k and v
    read, where it is not the stream after its norm.
    """
    batch, rows, _ = x.shape
    rope = rope or config.rope
    frequency = rope_frequencies(rope, config.head_dim)

    def norm(x: Array, name: str) -> Array:
        """Normalise, where this family does so."""
        return config.norm(x, p[name], config.norm_eps) if name in p else x

    normed = norm(x, "attn_norm") if attended is None else attended
    if "qkv" in p:
        ends = config.heads * config.head_dim, (config.heads + config.kv_heads) * config.head_dim
        projected = jnp.split(project(p, "qkv", normed), ends, axis=-1)
    else:
        projected = [project(p, name, normed) for name in "qkv"]
    query, key, value = (x.reshape(batch, rows, -1, config.head_dim) for x in projected)
    query = rotate(norm(query, "q_norm"), position, frequency, rope.attention_factor)
    key = rotate(norm(key, "k_norm"), position, frequency, rope.attention_factor)
    entry = write(key, value)
    mixed = attention(query, entry).reshape(batch, rows, config.heads * config.head_dim)
    x = x + norm(project(p, "o", mixed), "attn_post_norm")
    normed = norm(x, "mlp_norm")
    hidden = config.activation(project(p, "gate", normed)) * project(p, "up", normed)
    return x + norm(project(p, "down", hidden), "mlp_post_norm"), entry


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a decoder over a cache; a draft head runs them on a stream of its own.

    ``forward(params, cache, x_BTD, tree, attended=None) -> (streams, cache)``: the streams
    after 0, 1, ... layers; ``attended`` is what the first layer's q, k and v read.
    ``init_cache`` and ``commit`` are those of `jspec.types.Model`.
    """

    init_cache: Callable[..., dense.Cache]
    forward: Callable[..., tuple[list[Array], dense.Cache]]
    commit: Callable[..., dense.Cache]


def make_layers(
    config: Config,
    dtype: jax.typing.DTypeLike,
    *,
    attend: Callable = attend,
    write: Callable = dense.write,
    compact: Callable = dense.compact,
    ring_multiple: int = 1,
) -> Layers:
    """The `Layers` of a config, with a cache of ``dtype``.

    ``attend``, ``write`` and ``compact``: plain code, or what `jspec.pallas.select` has for a
    device, with the signatures of `jspec.models.layers.attend`, `jspec.cache.dense.write` and
    `jspec.cache.dense.compact`; of attention, what comes by keyword is passed only to the layers
    that need it. ``ring_multiple``: the slots of a ring are rounded up to one.
    """
    windows = tuple(config.window(index) for index in range(config.layers))
    scale = config.head_dim**-0.5 if config.scale is None else config.scale

    def init_cache(batch: int, slots: int, scratch: int | None = None) -> dense.Cache:
        sizes = [dense.ring_slots(slots, window, scratch) for window in windows]
        sizes = [min(slots, -(-size // ring_multiple) * ring_multiple) for size in sizes]
        return dense.init(sizes, batch, config.kv_heads, config.head_dim, dtype)

    def forward(params: Params, cache: dense.Cache, x: Array, tree: Tree, attended: Array | None = None):
        position = cache.length[:, None] + tree.depth
        start = cache.length + earlier_rows(tree)
        # To the rows of a chain those of its earlier passes are as good as committed.
        before, depth = cache.length, tree.depth
        if tree.mask is None:
            before, depth = start, tree.depth - tree.depth[:, :1]
        streams, entries = [x], []
        for index, (p, entry) in enumerate(zip(params, cache.layers, strict=True)):
            window = windows[index]
            options = {} if window is None else dict(window=window, depth=depth)
            if config.attention_softcap is not None:
                options["softcap"] = config.attention_softcap

            def store(key, value, entry=entry, window=window):
                key, value = dense.hide_bad_values(key, value, entry.keys.dtype)
                return write(entry, key, value, start, wrap=window is not None)

            def attention(query, entry, options=options):
                return attend(query, *entry, before, tree.mask, scale, **options)

            rope = config.rope if window is None else config.window_rope
            x, entry = layer(config, p, x, position, store, attention, rope, attended)
            attended = None
            streams.append(x)
            entries.append(entry)
        return streams, cache._replace(layers=tuple(entries))

    def commit(cache: dense.Cache, path: Int[Array, "B P"] | None, count: Int[Array, "B"]) -> dense.Cache:
        return dense.commit(cache, path, count, [window is not None for window in windows], compact)

    return Layers(init_cache, forward, commit)


@built_once
def make(
    config: Config,
    *,
    feature_layers: tuple[int, ...] = (),
    dtype: jax.typing.DTypeLike = jnp.float32,
    **kernels: Any,
) -> Model:
    """Build the `Model` of a config.

    ``feature_layers``: which residual streams become the features, concatenated in this order;
    k means the stream after k layers (Hugging Face's ``hidden_states[k]``), `FINAL` the
    state after the final norm. ``dtype`` is the cache's; params bring their own.
    ``kernels``: options of `make_layers`. Raises `JspecError` for feature layers that are not there.
    """
    if bad := [t for t in feature_layers if not FINAL <= t <= config.layers]:
        raise JspecError(
            f"feature layers {bad} outside 0..{config.layers} (or {FINAL}, after the final norm)"
        )
    layers = make_layers(config, dtype, **kernels)

    def forward(params: Params, cache: dense.Cache, tokens: Array, tree: Tree):
        # A Python number takes the dtype of the embedding, as in transformers.
        x = params["embed"][tokens] * config.embed_scale
        streams, cache = layers.forward(params["layers"], cache, x, tree)
        hidden = config.norm(streams[-1], params["norm"], config.norm_eps)
        tapped = [hidden if t == FINAL else streams[t] for t in feature_layers] or [hidden[..., :0]]
        return hidden, jnp.concatenate(tapped, axis=-1), cache

    def unembed(params: Params, hidden: Array) -> Array:
        batch, rows, hidden_size = hidden.shape
        head, formula = (params["embed"], "rd,vd->rv") if config.tied else (params["head"], "rd,dv->rv")
        # One matrix of rows, for TPUs pad the last but one axis of an array to 8.
        flat = hidden.reshape(batch * rows, hidden_size)
        logits = jnp.einsum(formula, flat, head, preferred_element_type=jnp.float32)
        logits = logits.reshape(batch, rows, config.vocab_size)
        return logits if config.final_softcap is None else soft_cap(logits, config.final_softcap)

    return Model(
        init_cache=layers.init_cache,
        forward=forward,
        commit=layers.commit,
        unembed=unembed,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        feature_size=len(feature_layers) * config.hidden_size,
    )
