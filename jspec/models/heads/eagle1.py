"""The head of EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858): one layer that continues the features.

    x = fc([embed(x_{j+1}) ; f_j])       h = layers(x)       logits = target's head(h)

f is the target's state after its final norm, and h, the prediction of f_{j+1}, takes its
place in the next step. The first layer has no norm before its attention. NVIDIA's and
speculators' forms may add that norm and two more, of the embedding and of h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.models import decoder
from jspec.models.decoder import FINAL, layer_weights, linear_weights, make_layers, norm_weight, project
from jspec.models.heads import Head
from jspec.models.layers import Weight, head_logits
from jspec.once import built_once
from jspec.types import Params, Tree


@dataclass(frozen=True)
class Config:
    """What the head is made of. ``decoder.vocab_size`` is the target's, and the head's too."""

    decoder: decoder.Config
    fc_bias: bool = True
    embed_norm: bool = False  # of the embedding, before fc
    first_norm: bool = False  # of x, before the first attention
    final_norm: bool = False  # of h
    own_embed: bool = False  # the file has an embedding


def weights(
    config: Config, roots: Sequence[str], fc: str = "fc", norms: Sequence[str] = ()
) -> dict[str, Any]:
    """Describe the tensors of the file: ``roots`` begin the names of the layers, ``fc`` that of the map.

    ``norms``: the names of the embedding's norm and of the final one.
    """
    hidden_size = config.decoder.hidden_size
    tree: dict[str, Any] = {
        **linear_weights("fc", fc, (2 * hidden_size, hidden_size), ("concat", "embed"), config.fc_bias),
        "layers": [layer_weights(config.decoder, root) for root in roots],
    }
    if not config.first_norm:
        del tree["layers"][0]["attn_norm"]
    if config.embed_norm:
        tree["embed_norm"] = norm_weight(hidden_size, "embed", norms[0])
    if config.final_norm:
        tree["norm"] = norm_weight(hidden_size, "embed", norms[1])
    if config.own_embed:
        tree["embed"] = Weight(
            (config.decoder.vocab_size, hidden_size), ("vocab", "embed"), "embed_tokens.weight"
        )
    return tree


@built_once
def make(
    config: Config,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    **kernels: Any,
) -> Head:
    """Build the `Head` of a config; the options are those of `decoder.make`.

    The params are those of `weights` with ``embed`` and ``head`` (or ``rows``) beside them.
    """
    settings = config.decoder
    layers = make_layers(settings, dtype, **kernels)

    def norm(params: Params, name: str, x: Array) -> Array:
        return settings.norm(x, params[name], settings.norm_eps) if name in params else x

    def fuse(params: Params, features: Array) -> Array:
        return features

    def forward(params: Params, cache: Any, tokens: Array, stream: Array, tree: Tree):
        embedded = norm(params, "embed_norm", params["embed"][tokens])
        x = project(params, "fc", jnp.concatenate([embedded, stream], axis=-1))
        streams, cache = layers.forward(params["layers"], cache, x, tree)
        out = norm(params, "norm", streams[-1])
        return out, out, cache

    return Head(
        init_cache=layers.init_cache,
        fuse=fuse,
        forward=forward,
        commit=layers.commit,
        unembed=head_logits,
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        feature_size=settings.hidden_size,
        feature_layers=(FINAL,),
        context_length=settings.context_length,
    )
