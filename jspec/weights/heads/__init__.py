"""Draft heads from their public formats: EAGLE-1 and 2, EAGLE-3 and Medusa.

A head is recognised by what its folder holds: speculators' files by a key of config.json,
the others by the names of their tensors (``architectures`` is not to be trusted: most
say LlamaForCausalLM). Embeddings and heads that a format leaves out, or copies, are the
target's own arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jspec.errors import JspecError
from jspec.files import read_json
from jspec.models.config import ConfigError, shown
from jspec.models.heads import Head, Heads
from jspec.types import Params
from jspec.weights.heads import eagle1, eagle3, medusa
from jspec.weights.heads.base import HeadKind
from jspec.weights.heads.files import SAFETENSORS, TORCH, open_files
from jspec.weights.huggingface import weight_files
from jspec.weights.load import Checkpoint

KINDS: tuple[HeadKind, ...] = (medusa.KIND, eagle3.KIND, eagle1.KIND)
"""The kinds of heads, in the order in which they are asked whether a folder is theirs."""


class NoHead(JspecError):
    """A folder whose tensors are those of no draft head."""


@dataclass(frozen=True, eq=False)
class LoadedHead:
    """A draft head, ready for a drafter."""

    kind: HeadKind
    head: Head | Heads  # Heads for "medusa"
    params: Params
    config: Any  # of jspec.models.heads.eagle1, eagle3 or medusa
    path: Path


def load_head(path: str | Path, target: Checkpoint, dtype: Any = None, **kernels: Any) -> LoadedHead:
    """Load the draft head in a folder for a loaded target; ``dtype``: the target's, unless given.
    ``kernels``: options of `jspec.models.decoder.make_layers`.

    Raises `JspecError` for a folder that is no head, for the head of another target, and for
    a config or tensor that does not fit.
    """
    folder = Path(path).expanduser()
    source = open_files(folder)
    file = folder / "config.json"
    needed = not any(kind.recognise({}, source.tensors) for kind in KINDS if not kind.needs_config)
    config = read_json(file) if file.is_file() or needed else {}
    kind = recognise(folder, config, source.tensors)
    dtype = target.params["embed"].dtype if dtype is None else jnp.dtype(dtype)
    try:
        head, params, parsed = kind.load(config, source, target, dtype, **kernels)
    except ConfigError as error:  # it begins with the name of the file
        raise ConfigError(f"{folder}/{error}") from None
    return LoadedHead(kind, head, params, parsed, folder)


def is_head(path: str | Path) -> bool:
    """Whether a path is a folder with the tensors of a draft head. `JspecError` for a corrupt file."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or not any(weight_files(folder, single) for single in SAFETENSORS + TORCH):
        return False
    if (folder / "model.safetensors.index.json").is_file():
        return False  # heads are small: this is a model, whose many files need not all be opened
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("speculators_model_type") is not None:
        return True
    try:
        recognise(folder, config, open_files(folder).tensors)
    except NoHead:
        return False
    return True


def recognise(folder: Path, config: Mapping[str, Any], tensors: Collection[str]) -> HeadKind:
    """The kind of head that a config.json and the names of tensors make. Raises `JspecError`."""
    for kind in KINDS:
        if kind.recognise(config, tensors):
            return kind
    if (named := config.get("speculators_model_type")) is not None:
        raise JspecError(
            f"{folder}: speculators_model_type {shown(named)} is not supported (eagle and eagle3 are)"
        )
    tensors_of = ", ".join(f"{kind.tensors} ({kind.name})" for kind in KINDS)
    raise NoHead(
        f"{folder} is no draft head: its config.json has no speculators_model_type, and its {len(tensors)} "
        f"tensors are those of no kind: {tensors_of}"
    )
