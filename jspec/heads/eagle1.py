"""Loading EAGLE's heads: the original format, speculators' "eagle" and NVIDIA's export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jspec.checkpoint import Checkpoint, Source, load_params
from jspec.heads.settings import (
    NOTES,
    check_vocabulary,
    check_width,
    decoder_config,
    layer_config,
    nested,
    shared_embedding,
    target_head,
)
from jspec.models.config import Reader
from jspec.models.eagle1 import Config, make, weights
from jspec.types import Head, Params

# The file is often the target's own config.json; the head is a dense Llama layer even so.
TARGETS_OWN = frozenset(
    """num_local_experts num_experts_per_tok output_router_logits router_aux_loss_coef
    router_jitter_noise""".split()
)


def load(
    config: Mapping[str, Any], source: Source, target: Checkpoint, dtype: Any, **kernels: Any
) -> tuple[Head, Params, Config]:
    """The head, its params (the target's embedding and head among them) and its settings."""
    speculators = "speculators_model_type" in config
    parsed = read_speculators(config, source) if speculators else read_original(config, source)
    check_vocabulary(source.path, parsed.decoder.vocab_size, target)
    check_width(source.path, "reads features", parsed.decoder.width, target)
    if speculators:
        tree = weights(parsed, ["transformer"], "fusion_fc", ["embedding_layernorm", "pre_lm_head_layernorm"])
    else:
        roots = [f"layers.{index}" for index in range(parsed.decoder.layers)]
        tree = weights(parsed, roots, norms=["", "norm"])
    params = load_params(tree, source, dtype)
    params |= {"embed": shared_embedding(params, target)} | target_head(target)
    return make(parsed, dtype=dtype, **kernels), params, parsed


def read_original(config: Mapping[str, Any], source: Source) -> Config:
    """The original format, and NVIDIA's, which has an ``eagle_config`` with the norms in it."""
    read, extra = Reader(config), Reader(nested(config, "eagle_config"))
    read.seen |= NOTES | TARGETS_OWN | {"eagle_config", "draft_vocab_size"}
    for key, expected in (("use_aux_hidden_state", False), ("use_mtp_layernorm", False)):
        extra.require(key, expected)
    extra.seen |= NOTES | {"eagle_aux_hidden_state_layer_ids", "next_layer_regular"}
    extra.require("parallel_draft_step", 1)
    parsed = Config(
        decoder=decoder_config(read, source.tensors, "layers.0"),
        fc_bias=read.flag("bias", default=True),
        first_norm=extra.flag("use_input_layernorm_in_first_layer"),
        final_norm=extra.flag("use_last_layernorm"),
        own_embed="embed_tokens.weight" in source.tensors,
    )
    read.done()
    extra.done()
    return parsed


def read_speculators(config: Mapping[str, Any], source: Source) -> Config:
    """The format that speculators wrote until 2025, of EAGLE's and HASS's (arXiv 2408.15766) heads."""
    read, inner = Reader(config), Reader(layer_config(config))
    read.seen |= NOTES | {"speculators_model_type", "transformer_layer_config", "tie_word_embeddings"}
    norms = read.flag("layernorms")
    layers = decoder_config(inner, source.tensors, "transformer")
    if layers.layers != 1:  # there it is the target's count: the file has one layer
        layers = replace(layers, layers=1)
    parsed = Config(
        decoder=layers,
        fc_bias=read.flag("fusion_bias"),
        embed_norm=norms,
        first_norm=norms,
        final_norm=norms,
        own_embed="embed_tokens.weight" in source.tensors,
    )
    read.done()
    inner.done()
    return parsed
