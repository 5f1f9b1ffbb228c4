"""Loading a model from whatever a path means: a Hugging Face folder, a GGUF file, or an Orbax folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from jspec.errors import JspecError
from jspec.files import listed, read_json
from jspec.models import FAMILIES
from jspec.models.config import ConfigError, shown
from jspec.types import Params
from jspec.weights import multimodal, orbax
from jspec.weights.base import Source, load_params
from jspec.weights.gguf import GgufFile
from jspec.weights.huggingface import SafetensorsFolder


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: its family's module, that module's `Config`, the params, and their path.

    ``json``: the content of its config.json, as a plain folder of the model has it: a GGUF file has
    none, and that of a multimodal model is longer.
    """

    family: ModuleType
    config: Any
    params: Params
    path: Path
    json: Mapping[str, Any]

    @property
    def home(self) -> Path:
        """The folder of the tokenizer: transformers reads none from a GGUF file, but from beside it."""
        return self.path if self.path.is_dir() else self.path.parent


def load_checkpoint(path: str | Path, dtype: Any = jnp.float32) -> Checkpoint:
    """Load a model from a Hugging Face folder, a ``.gguf`` file (or a folder of one), or an Orbax folder.

    Of a multimodal model the text part is loaded, as the plain model that it is. Params are cast
    to ``dtype`` (float32, bfloat16, float16; None: `load_dtype`) and put on the default device.
    Raises `JspecError` for a path, config or tensor that does not fit.

    >>> load_checkpoint("model.safetensors")
    Traceback (most recent call last):
    jspec.errors.JspecError: model.safetensors does not exist: give a Hugging Face folder or a .gguf file
    """
    path = _locate(Path(path).expanduser())
    try:
        return _load(path, dtype)
    except ConfigError as error:  # it begins with the name of the file
        raise ConfigError(f"{path}: {error}" if path.is_file() else f"{path}/{error}") from None


def _load(path: Path, dtype: Any) -> Checkpoint:
    """Load from a folder, or from a .gguf file."""
    if path.is_file():
        file = GgufFile(path)
        family, config, weights = _family(file.config)
        return Checkpoint(family, config, load_params(weights, file, dtype), path, file.config)
    content = read_config(path)
    in_orbax = (path / orbax.ORBAX).is_dir() and not any(path.glob("model.safetensors*"))
    source: Source | None = None
    if content["model_type"] in multimodal.TEXT_PARTS:
        if not in_orbax:
            source = multimodal.TextTensors(SafetensorsFolder(path))
        has_head = None if source is None else "lm_head.weight" in source.tensors
        content = multimodal.text_config(content, has_head)
        family, config, weights = _family(content, multimodal.PLACE)
    else:
        family, config, weights = _family(content)
    if in_orbax:
        return Checkpoint(family, config, orbax.restore(path, weights, dtype), path, content)
    params = load_params(weights, source or SafetensorsFolder(path), dtype)
    return Checkpoint(family, config, params, path, content)


def _family(content: Mapping[str, Any], place: str = "") -> tuple[ModuleType, Any, Any]:
    """The family that a config.json asks for, its reading of it, and the weights."""
    family = FAMILIES[content["model_type"]]
    config = family.from_hf(content, place)
    return family, config, family.weights(config)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and check its ``model_type``."""
    path = folder / "config.json"
    config = read_json(path)
    kind, parts = config.get("model_type"), ", ".join(multimodal.TEXT_PARTS)
    known = f"{', '.join(sorted(FAMILIES))}, and the text part of {parts}"
    if kind is None:
        raise JspecError(f"{path} has no 'model_type' (supported: {known})")
    if isinstance(kind, str) and kind in multimodal.MROPE:
        raise JspecError(
            f"{path}: model_type {shown(kind)} is not supported: its positions are of time, height and width "
            "(mrope), and those of every family here are one number"
        )
    if not isinstance(kind, str) or kind not in {*FAMILIES, *multimodal.TEXT_PARTS}:
        raise JspecError(f"{path}: model_type {shown(kind)} is not supported (supported: {known})")
    return config


def _locate(path: Path) -> Path:
    """The folder with config.json, or the .gguf file, that a user's path means."""
    if not path.exists():
        raise JspecError(f"{path} does not exist: give a Hugging Face folder or a .gguf file")
    if path.is_file():
        if path.suffix != ".gguf":
            raise JspecError(f"{path} is not a .gguf file: give one, or the folder that has config.json")
        return path
    if (path / "config.json").exists():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise JspecError(
            f"{path} has several .gguf files ({listed([p.name for p in found])}): give one of them"
        )
    if not found:
        raise JspecError(f"{path} has no config.json: give a Hugging Face folder or a .gguf file")
    return found[0]
