"""The head of EAGLE-3 (arXiv 2503.01840): a layer that reads several of the target's layers.

    g = fc(features)                     once, from the target; later g is the head's own
    h = g + attention([norm_e(embed(x_{j+1})) ; norm_g(g)])
    out = h + mlp(norm(h))               logits = head(norm(out)), over a vocabulary of its own

The next step takes ``out`` for g, without fc. Every variant that a checkpoint may ask for
is a field of `Config` and off by default. Layers after the first are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.models import decoder
from jspec.models.decoder import layer_weights, linear_weights, make_layers, norm_weight, project
from jspec.models.heads import Head
from jspec.models.layers import Weight, head_logits
from jspec.once import built_once
from jspec.types import Params, Tree


@dataclass(frozen=True)
class Config:
    """What the head is made of. ``decoder.vocab_size`` is the target's: the rows of the embedding."""

    decoder: decoder.Config
    draft_vocab: int  # W: the columns of the head
    feature_layers: tuple[int, ...]  # as in `decoder.make`, in the order of their place in a feature
    target_hidden_size: int  # of each of them
    fc: bool = True  # False: one feature layer, of the head's own width, taken as it is
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm of the whole feature
    fc_norm: bool = False  # one of each feature layer
    norm_before_residual: bool = False  # h = norm_g(g) + ...
    final_norm: bool = True
    norm_output: bool = False  # the next step takes norm(out)
    own_embed: bool = False  # the file has an embedding
    own_head: bool = True  # and a head


def weights(config: Config, roots: Sequence[str]) -> dict[str, Any]:
    """Describe the tensors of the file; ``roots`` begin the names of the layers."""
    hidden_size, total = config.decoder.hidden_size, len(config.feature_layers) * config.target_hidden_size
    first = layer_weights(config.decoder, roots[0], attended=2 * hidden_size)
    first["embed_norm"] = first.pop("attn_norm")
    first["hidden_norm"] = norm_weight(hidden_size, "embed", f"{roots[0]}.hidden_norm")
    tree: dict[str, Any] = {"layers": [first, *(layer_weights(config.decoder, root) for root in roots[1:])]}
    if config.fc:
        tree |= linear_weights("fc", "fc", (total, hidden_size), ("concat", "embed"), config.fc_bias)
    if config.norm_before_fc:
        tree["input_norm"] = norm_weight(total, "concat", "input_norm")
    if config.fc_norm:
        tree["fc_norm"] = [
            norm_weight(config.target_hidden_size, "embed", f"fc_norm.{i}")
            for i in range(len(config.feature_layers))
        ]
    if config.final_norm:
        tree["norm"] = norm_weight(hidden_size, "embed", "norm")
    if config.own_embed:
        tree["embed"] = Weight(
            (config.decoder.vocab_size, hidden_size), ("vocab", "embed"), "embed_tokens.weight"
        )
    if config.own_head:
        shape = (hidden_size, config.draft_vocab)
        tree["head"] = Weight(shape, ("embed", "vocab"), "lm_head.weight", transpose=True)
    return tree


@built_once
def make(
    config: Config,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    **kernels: Any,
) -> Head:
    """Build the `Head` of a config; the options are those of `decoder.make`.

    The params are those of `weights` with ``embed`` and ``head`` (or ``rows``) beside them,
    and ``ids`` where the head has a vocabulary of its own.
    """
    settings = config.decoder
    layers = make_layers(settings, dtype, **kernels)

    def norm(x: Array, weight: Array) -> Array:
        return settings.norm(x, weight, settings.norm_eps)

    def fuse(params: Params, features: Array) -> Array:
        if config.norm_before_fc:
            features = norm(features, params["input_norm"])
        if config.fc_norm:
            slices = jnp.split(features, len(config.feature_layers), axis=-1)
            pairs = zip(slices, params["fc_norm"], strict=True)
            features = jnp.concatenate([norm(x, weight) for x, weight in pairs], axis=-1)
        return project(params, "fc", features) if config.fc else features

    def forward(params: Params, cache: Any, tokens: Array, stream: Array, tree: Tree):
        first = params["layers"][0]
        normed = norm(stream, first["hidden_norm"])
        embedded = norm(params["embed"][tokens], first["embed_norm"])
        x = normed if config.norm_before_residual else stream
        attended = jnp.concatenate([embedded, normed], axis=-1)
        streams, cache = layers.forward(params["layers"], cache, x, tree, attended)
        out = streams[-1]
        hidden = norm(out, params["norm"]) if config.final_norm else out
        return hidden, hidden if config.norm_output else out, cache

    return Head(
        init_cache=layers.init_cache,
        fuse=fuse,
        forward=forward,
        commit=layers.commit,
        unembed=head_logits,
        vocab_size=config.draft_vocab,
        hidden_size=settings.hidden_size,
        feature_size=len(config.feature_layers) * config.target_hidden_size,
        feature_layers=config.feature_layers,
        context_length=settings.context_length,
    )
