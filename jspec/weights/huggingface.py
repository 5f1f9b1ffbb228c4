"""Hugging Face folders: config.json beside model.safetensors, or the shards of its index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jspec.errors import JspecError
from jspec.files import listed, new_folder, read_json, refuse_pointer
from jspec.models.layers import Weight
from jspec.types import Params
from jspec.weights.base import SAFETENSORS_DTYPES, Tensor


class SafetensorsFolder:
    """The tensors of a folder: model.safetensors, or the shards of its index; or the given files.

    Raises `JspecError` for an absent or corrupt file.
    """

    def __init__(self, folder: Path, names: list[str] | None = None):
        self.path = folder
        self.tensors: dict[str, Tensor] = {}
        self._file: dict[str, Any] = {}
        self.twice: list[str] = []
        names = _weight_files(folder) if names is None else names
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise JspecError(f"{folder} lacks weight files: {listed(missing)}")
        for name in names:
            file = _open(folder / name)
            for key in file.keys():
                view = file.get_slice(key)
                dtype = str(view.get_dtype())
                if key in self.tensors:
                    self.twice.append(key)
                self.tensors[key] = Tensor(tuple(view.get_shape()), dtype, dtype in SAFETENSORS_DTYPES)
                self._file[key] = file

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._file[name].get_slice(name)[start:stop]


def _open(path: Path) -> Any:
    try:
        refuse_pointer(path)
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise JspecError(f"{path} is corrupt or cut short: {error}") from None


def weight_files(folder: Path, single: str = "model.safetensors") -> list[str]:
    """Names of the weight files: ``single``, or those that its index lists, or none."""
    index = folder / f"{single}.index.json"
    if (folder / single).is_file():
        return [single]
    if not index.is_file():
        return []
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()) or not files:
        raise JspecError(f"{index} has no 'weight_map' from tensor names to file names")
    if outside := sorted({f for f in files.values() if Path(f).name != f}):
        raise JspecError(f"{index} names files outside its folder: {listed(outside)}")
    return sorted(set(files.values()))


def _weight_files(folder: Path) -> list[str]:
    if names := weight_files(folder):
        return names
    if others := sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")):
        raise JspecError(
            f"{folder} has weights only in PyTorch's format ({listed(others)}): convert them to "
            "safetensors, e.g. by model.save_pretrained(folder, safe_serialization=True)"
        )
    raise JspecError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def save_params(folder: str | Path, config: Mapping[str, Any], params: Params, weights: Any) -> None:
    """Write params as a Hugging Face folder (config.json, model.safetensors), whole or not at all.

    ``config``: the content of config.json. Raises `JspecError` if the folder cannot be
    written or already holds something.
    """

    with new_folder(folder) as temporary:
        write_params(temporary, config, params, weights)


def write_params(folder: Path, config: Mapping[str, Any], params: Params, weights: Any) -> None:
    """The same, into an existing folder."""

    tensors: dict[str, np.ndarray] = {}

    def collect(weight: Weight, array: Array) -> None:
        whole, first = np.asarray(array), 0
        for part in weight.stored:
            own = whole[..., first : first + part.shape[-1]]
            first += part.shape[-1]
            tensors[part.source] = own.T if part.transpose else own

    jax.tree.map(collect, weights, params)
    write_model(folder, config, tensors)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json into an existing folder."""
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")


def write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write config.json and model.safetensors into an existing folder."""
    write_config(folder, config)
    # The library writes the memory behind an array as it lies: a transposed view would come out wrong.
    dense = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # it comes out private
