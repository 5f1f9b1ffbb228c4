"""Loading and saving parameters: a Hugging Face folder, a GGUF file, or an Orbax folder.

A source lists its tensors (name -> `Tensor`) and reads a block of rows of one. Weights
are read by blocks into the memory that the array keeps, so that loading needs little
more than the weights themselves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jspec.errors import JspecError
from jspec.files import listed, new_folder, read_json
from jspec.models import FAMILIES
from jspec.models.layers import Weight
from jspec.types import Params

DTYPES = ("float32", "bfloat16", "float16")
SAFETENSORS_DTYPES = ("F32", "BF16", "F16")  # the same ones
ORBAX = "params"  # the folder beside config.json that holds what Orbax wrote
TOLERATED = ("lm_head.weight", "rotary_emb.inv_freq")
"""Endings of tensors that a file may hold without use: a tied head, a constant."""
BLOCK = 128  # rows read at once: small enough for a transposed write to stay in the CPU's cache


class Tensor(NamedTuple):
    """A tensor in a file: its shape there, the file's name for its dtype, and whether we read that."""

    shape: tuple[int, ...]
    dtype: str
    readable: bool


@runtime_checkable
class Source(Protocol):
    """Where tensors come from. ``rows`` gives rows start..stop of one, as a numpy array."""

    path: Path
    tensors: dict[str, Tensor]
    twice: list[str]  # names held more than once

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: its family's module, that module's `Config`, the params, and their path.

    ``json``: the content of its config.json, which a GGUF file has no file for.
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


def load(path: str | Path, dtype: Any = jnp.float32) -> Checkpoint:
    """Load a model from a Hugging Face folder, a ``.gguf`` file (or a folder of one), or an Orbax folder.

    Params are cast to ``dtype`` (float32, bfloat16, float16; None: `load_dtype`) and put on
    the default device. Raises `JspecError` for a path, config or tensor that does not fit.
    """
    path = _locate(Path(path).expanduser())
    if path.is_file():  # a .gguf file
        from jspec.gguf import GgufFile

        file = GgufFile(path)
        family, config, weights = _family(file.config)
        return Checkpoint(family, config, load_params(weights, file, dtype), path, file.config)
    content = read_config(path)
    family, config, weights = _family(content)
    if (path / ORBAX).is_dir() and not any(path.glob("model.safetensors*")):
        from jspec.orbax_folder import restore

        return Checkpoint(family, config, restore(path, weights, dtype), path, content)
    params = load_params(weights, SafetensorsFolder(path), dtype)
    return Checkpoint(family, config, params, path, content)


def _family(content: Mapping[str, Any]) -> tuple[ModuleType, Any, Any]:
    """The family that a config.json asks for, its reading of it, and the weights."""
    family = FAMILIES[content["model_type"]]
    config = family.from_hf(content)
    return family, config, family.weights(config)


def load_params(
    weights: Any, source: Source, dtype: Any = jnp.float32, ignore: Collection[str] = ()
) -> Params:
    """Read every `Weight` of a tree from a source, as ``dtype`` arrays on the default device.

    ``dtype``: see `load`. ``ignore``: names of tensors that the source may hold beside them.
    Raises one `JspecError` that names every missing, unknown, misshapen or unreadable tensor.
    """
    leaves = jax.tree.leaves(weights)
    _check(leaves, source, ignore)
    short = dict(zip(SAFETENSORS_DTYPES, DTYPES, strict=True))
    stored = {short.get(source.tensors[weight.source].dtype, "") for weight in leaves}
    dtype = load_dtype(dtype, stored)
    return jax.tree.map(lambda weight: _read(weight, source, dtype), weights)


def load_dtype(dtype: Any, stored: Set[str]) -> np.dtype:
    """The dtype to load tensors as that are ``stored`` in these; `JspecError` for one that we do not load.

    None: the one that all are stored in, or else float32, which holds every value of the
    others and of quantised tensors.
    """
    if dtype is None:
        (dtype,) = stored if len(stored) == 1 and stored <= set(DTYPES) else ("float32",)
    try:
        name = jnp.dtype(dtype).name
    except TypeError:  # no dtype at all
        name = str(dtype)
    if name not in DTYPES:
        raise JspecError(f"cannot load weights as {name}: choose one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def save_params(folder: str | Path, config: Mapping[str, Any], params: Params, weights: Any) -> None:
    """Write params as a Hugging Face folder (config.json, model.safetensors), whole or not at all.

    ``config``: the content of config.json. Raises `JspecError` if the folder cannot be
    written or already holds something.
    """

    with new_folder(folder) as temporary:
        write_params(temporary, config, params, weights)


def write_params(folder: Path, config: Mapping[str, Any], params: Params, weights: Any) -> None:
    """The same, into an existing folder."""

    def for_file(weight: Weight, array: Array) -> np.ndarray:
        return np.asarray(array).T if weight.transpose else np.asarray(array)

    arrays = jax.tree.leaves(jax.tree.map(for_file, weights, params))
    names = [weight.source for weight in jax.tree.leaves(weights)]
    write_model(folder, config, dict(zip(names, arrays, strict=True)))


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


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and check its ``model_type``."""
    path = folder / "config.json"
    config = read_json(path)
    kind, known = config.get("model_type"), ", ".join(sorted(FAMILIES))
    if kind is None:
        raise JspecError(f"{path} has no 'model_type' (supported: {known})")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise JspecError(f"{path}: model_type {kind!r} is not supported (supported: {known})")
    return config


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


def _file_shape(weight: Weight) -> tuple[int, ...]:
    return weight.shape[::-1] if weight.transpose else weight.shape


def _check(weights: list[Weight], source: Source, ignore: Collection[str]) -> None:
    """Raise one error for everything in the files that does not fit the model."""
    wanted, held = {weight.source: _file_shape(weight) for weight in weights}, source.tensors
    used = sorted(wanted.keys() & held.keys())
    problems = {
        "missing tensors": sorted(wanted.keys() - held.keys()),
        "unknown tensors": sorted(
            n for n in held.keys() - wanted.keys() - set(ignore) if not n.endswith(TOLERATED)
        ),
        "misshapen tensors": [
            f"{n} is {list(held[n].shape)}, not {list(wanted[n])}" for n in used if held[n].shape != wanted[n]
        ],
        "tensors in more than one file": source.twice,
        "tensors of an unsupported dtype": [f"{n} is {held[n].dtype}" for n in used if not held[n].readable],
    }
    if text := "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names):
        raise JspecError(f"{source.path} does not hold the model that its config describes: {text}")


def _read(weight: Weight, source: Source, dtype: np.dtype) -> Array:
    out, rows = _aligned(weight.shape, dtype), _file_shape(weight)[0]
    target = out.T if weight.transpose else out
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        target[start:stop] = source.rows(weight.source, start, stop)
    # Waiting bounds the host memory where the device is not the CPU.
    return jax.block_until_ready(jax.device_put(out))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that JAX, on a CPU, takes over without a copy: it wants 64-byte alignment."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
