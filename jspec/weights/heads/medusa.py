"""Loading Medusa's heads: the original names, those of vLLM's files, and either inside a full model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.errors import JspecError
from jspec.models import decoder
from jspec.models.config import Reader
from jspec.models.heads import Heads
from jspec.models.heads.medusa import Config, make, weights
from jspec.models.layers import random_params
from jspec.sampling.drafters import DraftConfig, medusa
from jspec.types import Drafter, Params
from jspec.weights.base import Source, load_params
from jspec.weights.heads.base import HeadKind, complete, grown_shape, tree_size
from jspec.weights.heads.files import check_range, read_ids
from jspec.weights.heads.settings import NOTES, check_hidden_size, check_vocabulary, target_head
from jspec.weights.load import Checkpoint

ORIGINAL = re.compile(r"((?:medusa_heads?\.)?)(\d+)\.(\d+)\.linear\.weight")
VLLM = re.compile(r"((?:medusa_heads\.)?)blocks\.(\d+)\.layers\.(\d+)\.weight")


class Names(NamedTuple):
    """What the names of the tensors say."""

    prefix: str
    vllm: bool  # whose names they are
    heads: int
    blocks: int  # of each head


def find(tensors: Collection[str]) -> Names | None:
    """Recognise Medusa's tensors among others. The original config.json miscounts the heads.

    >>> find(["0.0.linear.weight", "0.1.weight", "1.0.linear.weight", "1.1.weight"])
    Names(prefix='', vllm=False, heads=2, blocks=1)
    """
    for pattern, vllm in ((ORIGINAL, False), (VLLM, True)):
        if found := [match for name in tensors if (match := pattern.fullmatch(name))]:
            heads, blocks = (1 + max(int(match[group]) for match in found) for group in (2, 3))
            return Names(found[0][1], vllm, heads, blocks)
    return None


def load(
    config: Mapping[str, Any], source: Source, target: Checkpoint, dtype: Any, **kernels: Any
) -> tuple[Heads, Params, Config]:
    """The heads, their params (the target's head among them, where they share it) and settings."""
    names = find(source.tensors)
    if names is None:
        raise JspecError(
            f"{source.path} has no Medusa heads: neither 0.0.linear.weight nor blocks.0.layers.0"
        )
    parse = _vllm if names.vllm else _original
    parsed, linear, head = parse(config, source, names, target)
    prefix, ids = names.prefix, None
    first = source.tensors.get(f"{linear.format(i=0, j=0)}.weight")
    if first is not None:
        check_hidden_size(source.path, "reads features", first.shape[-1], target)
    if parsed.vocab_size != target.config.vocab_size:
        ids = _token_map(source, prefix, parsed.vocab_size, target)
    held = source.tensors.get(f"{head.format(i=0)}.weight")
    # vLLM takes rows for all of the target's tokens too, and drops those that no draft token has.
    whole = ids is not None and held is not None and held.shape[0] != parsed.vocab_size
    in_file = replace(parsed, vocab_size=target.config.vocab_size) if whole else parsed
    # A full model holds much else; alone, the file holds nothing else.
    others = [name for name in source.tensors if prefix and not name.startswith(prefix)]
    ignore = [*others, "token_map", f"{prefix}token_map"]
    params = load_params(weights(in_file, linear, head), source, dtype, ignore)
    if whole:
        params["heads"] = [{"head": p["head"][:, jnp.asarray(ids)]} for p in params["heads"]]
    params["heads"] = params["heads"] or [target_head(target)]
    if ids is not None:
        params["ids"] = jnp.asarray(ids, jnp.int32)
    return make(parsed), params, parsed


def _original(
    config: Mapping[str, Any], source: Source, names: Names, target: Checkpoint
) -> tuple[Config, str, str]:
    """Settings, and the names of blocks and heads. The config.json is the target's in a full model."""
    if not names.prefix:
        read = Reader(config)
        read.seen |= NOTES | {"medusa_num_heads"}
        blocks = read.integer("medusa_num_layers", default=names.blocks)
        if blocks != names.blocks:
            raise JspecError(
                f"{source.path}: medusa_num_layers is {blocks}, and its heads have {names.blocks}"
            )
        read.done()
    linear, head = f"{names.prefix}{{i}}.{{j}}.linear", f"{names.prefix}{{i}}.{names.blocks}"
    if held := source.tensors.get(f"{head.format(i=0)}.weight"):
        check_vocabulary(source.path, held.shape[0], target)
    return (
        Config(target.config.hidden_size, target.config.vocab_size, names.heads, names.blocks),
        linear,
        head,
    )


def _vllm(
    config: Mapping[str, Any], source: Source, names: Names, target: Checkpoint
) -> tuple[Config, str, str]:
    """The same for vLLM's files, which may say that one head serves all, or a vocabulary of their own."""
    prefix, tensors, total = names.prefix, source.tensors, target.config.vocab_size
    read = Reader(config)
    read.seen |= NOTES | set("num_heads max_paths topk max_seq_len medusa_choices hidden_size".split())
    vocabulary = read.integer("vocab_size", default=total)
    check_vocabulary(source.path, vocabulary, target)
    blocks = read.integer("num_hidden_layers", default=names.blocks)
    if blocks != names.blocks:
        raise JspecError(f"{source.path}: num_hidden_layers is {blocks}, and its heads have {names.blocks}")
    shared, head = read.flag("original_lm_head"), f"{prefix}lm_heads.{{i}}"
    if f"{prefix}lm_head.weight" in tensors:
        head = f"{prefix}lm_head"
    own = int(f"{head.format(i=0)}.weight" in tensors) if shared else None
    parsed = Config(
        hidden_size=target.config.hidden_size,
        vocab_size=read.integer("truncated_vocab_size", default=vocabulary),
        heads=names.heads,
        blocks=names.blocks,
        bias=read.flag("medusa_fc_bias"),
        own_heads=own,
    )
    read.done()
    return parsed, f"{prefix}blocks.{{i}}.layers.{{j}}", head


def _token_map(source: Source, prefix: str, count: int, target: Checkpoint) -> np.ndarray:
    """The target ids of the draft tokens, as they stand in the file. Raises `JspecError`."""
    total = target.config.vocab_size
    for name in ("token_map", f"{prefix}token_map"):
        if name in source.tensors:
            ids = read_ids(source, name, count)
            check_range(source, name, ids, total)
            if len(np.unique(ids)) != count:
                raise JspecError(
                    f"{source.path}: {name} maps {count} draft tokens to {len(np.unique(ids))} ids"
                )
            return ids
    raise JspecError(
        f"{source.path} has no token_map, which says what the {count} draft tokens are among "
        f"the target's {total}"
    )


def recognise(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """By the tensors."""
    return config.get("speculators_model_type") is None and find(tensors) is not None


def drafter(head: Any, config: DraftConfig, vocab_size: int, context_length: int, drawn: bool) -> Drafter:
    """A chain or a static tree of as many levels as there are heads."""
    kind, depth, topk = grown_shape(head, config, "static", context_length, min(5, head.count))
    if kind == "dynamic":
        raise JspecError("Medusa's heads do not see each other's guesses: they grow a chain or a static tree")
    if depth > head.count:
        raise JspecError(f"drafts {depth} tokens deep need as many Medusa heads; there are {head.count}")
    shape = tree.chain_shape(depth)
    if kind == "static":
        size = tree_size(config, 25, complete(topk, depth), topk, depth)
        shape = tree.likeliest(size, depth, topk)
    return medusa(head, shape, vocab_size=vocab_size)


def random(target: decoder.Config, params: Params, dtype: str) -> tuple[Heads, Params]:
    """Three heads with random weights."""
    config = Config(target.hidden_size, target.vocab_size, heads=3, blocks=1)
    return make(config), random_params(weights(config, "{i}.{j}.linear", "{i}.1"), 1, dtype=dtype)


TENSORS = "0.0.linear.weight or blocks.0.layers.0.weight"
KIND = HeadKind(
    "medusa", recognise, load, drafter, random, TENSORS, default_tree="static", needs_config=False
)
