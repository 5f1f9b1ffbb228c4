"""Draft heads from their public formats: EAGLE-1 and 2, EAGLE-3 and Medusa.

A head is recognised by what its folder holds: speculators' files by a key of config.json,
the others by the names of their tensors (``architectures`` is not to be trusted: most
say LlamaForCausalLM). Embeddings and heads that a format leaves out, or copies, are the
target's own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jspec.checkpoint import Checkpoint, weight_files
from jspec.errors import JspecError
from jspec.files import read_json
from jspec.heads import eagle1, eagle3, medusa
from jspec.heads.files import SAFETENSORS, TORCH, open_files
from jspec.types import Head, Heads, Params

LOADERS: dict[str, Callable[..., tuple[Head | Heads, Params, Any]]] = {
    "eagle": eagle1.load,
    "eagle3": eagle3.load,
    "medusa": medusa.load,
}


class NoHead(JspecError):
    """A folder whose tensors are those of no draft head."""


@dataclass(frozen=True, eq=False)
class LoadedHead:
    """A draft head, ready for a drafter."""

    kind: str  # a key of LOADERS
    head: Head | Heads  # Heads for "medusa"
    params: Params
    config: Any  # of jspec.models.eagle1, eagle3 or medusa
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
    # Medusa's heads need none: every size is in the tensors.
    config = read_json(file) if file.is_file() or medusa.find(source.tensors) is None else {}
    kind = recognise(folder, config, source.tensors)
    dtype = target.params["embed"].dtype if dtype is None else jnp.dtype(dtype)
    head, params, parsed = LOADERS[kind](config, source, target, dtype, **kernels)
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


def recognise(folder: Path, config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """The kind of head that a config.json and the names of tensors make. Raises `JspecError`."""
    kind = config.get("speculators_model_type")
    if kind in ("eagle", "eagle3"):
        return str(kind)
    if kind is not None:
        raise JspecError(f"{folder}: speculators_model_type {kind!r} is not supported (eagle and eagle3 are)")
    if medusa.find(tensors) is not None:
        return "medusa"
    named = any("Eagle3" in str(name) for name in config.get("architectures") or ())
    if named or "layers.0.hidden_norm.weight" in tensors or any(n.startswith("midlayer.") for n in tensors):
        return "eagle3"
    if "fc.weight" in tensors and any(name.startswith("layers.0.") for name in tensors):
        return "eagle"
    raise NoHead(
        f"{folder} is no draft head: its config.json has no speculators_model_type, and there are none of "
        "the tensors midlayer.* or layers.0.hidden_norm.weight (EAGLE-3), fc.weight with layers.0.* "
        f"(EAGLE), 0.0.linear.weight or blocks.0.layers.0.weight (Medusa) among its {len(tensors)} tensors"
    )
