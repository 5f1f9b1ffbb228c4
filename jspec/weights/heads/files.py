"""The weight files of a draft head, and the tables of token ids in them.

PyTorch's files are read by torch's own reader with ``weights_only=True``, where torch is
installed; nothing here unpickles.
"""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.errors import JspecError
from jspec.files import refuse_pointer
from jspec.weights.base import Source, Tensor
from jspec.weights.huggingface import SafetensorsFolder, weight_files

SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors")
TORCH = ("pytorch_model.bin", "medusa_lm_head.pt")
INTEGERS = ("I64", "I32", "int64", "int32")


def open_files(folder: Path) -> Source:
    """The tensors of a head's folder, of whichever file there is. Raises `JspecError`."""
    if not folder.is_dir():
        raise JspecError(f"{folder} is no folder: give the folder of a draft head")
    for single in SAFETENSORS:
        if names := weight_files(folder, single):
            return SafetensorsFolder(folder, names)
    for single in TORCH:
        if names := weight_files(folder, single):
            return TorchFiles(folder, names)
    raise JspecError(f"{folder} is no draft head: it has none of {', '.join(SAFETENSORS + TORCH)}")


class TorchFiles:
    """The tensors of files that torch wrote. Raises `JspecError` without torch, and for a corrupt file."""

    def __init__(self, folder: Path, names: list[str]):
        self.path = folder
        self.tensors: dict[str, Tensor] = {}
        self._tensor: dict[str, Any] = {}
        self.twice: list[str] = []
        for name in names:
            for key, tensor in _load(folder / name).items():
                if key in self.tensors:
                    self.twice.append(key)
                kind = str(tensor.dtype).removeprefix("torch.")
                readable = kind in ("float32", "float16", "bfloat16")
                self.tensors[key] = Tensor(tuple(tensor.shape), kind, readable)
                self._tensor[key] = tensor

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rows = self._tensor[name][start:stop].contiguous()
        if self.tensors[name].dtype == "bfloat16":  # numpy has none: hand over the bits
            torch = importlib.import_module("torch")
            return rows.view(torch.int16).numpy().view(jnp.bfloat16)
        return rows.numpy()


def _load(path: Path) -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        raise JspecError(
            f"reading {path} needs torch: pip install torch, or convert the file elsewhere: "
            f"{conversion(path)}"
        ) from None
    if not path.is_file():
        raise JspecError(f"{path.parent} lacks weight files: {path.name}")
    refuse_pointer(path)
    try:
        # Only the newer of torch's two forms, a zip, can be mapped instead of read.
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a file cut short raises whatever its reader stumbles over
        reason = " ".join(str(error).split())[:200]
        raise JspecError(f"{path} is corrupt, cut short, or holds more than tensors: {reason}") from None
    named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not named or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise JspecError(f"{path} should hold tensors by name, as state_dict() gives them")
    return state


def conversion(path: Path) -> str:
    """The command that writes a file of torch's as safetensors, beside it."""
    new = "medusa_lm_head.safetensors" if path.suffix == ".pt" else "model.safetensors"
    return (
        'python -c "import torch; from safetensors.torch import save_file; '
        f"state = torch.load({str(path)!r}, map_location='cpu', weights_only=True); "
        "save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, "
        f'{str(path.with_name(new))!r})"'
    )


def read_ids(source: Source, name: str, count: int) -> np.ndarray:
    """A table of ``count`` integers. Raises `JspecError`."""
    held = source.tensors[name]
    if held.shape != (count,) or held.dtype not in INTEGERS:
        raise JspecError(
            f"{source.path}: {name} is {held.dtype} {list(held.shape)}, not one integer for each of "
            f"{count} draft tokens"
        )
    return source.rows(name, 0, count).astype(np.int64)


def check_range(source: Source, name: str, ids: np.ndarray, vocabulary: int) -> None:
    """Raise `JspecError` for a target id that the target does not have."""
    if (bad := (ids < 0) | (ids >= vocabulary)).any():
        draft = int(np.argmax(bad))
        raise JspecError(
            f"{source.path}: {name} maps draft token {draft} to {ids[draft]}, but the target has "
            f"{vocabulary} tokens"
        )


def draft_ids(source: Source, name: str, count: int, vocabulary: int) -> np.ndarray:
    """The target ids of the draft tokens, from their offsets: ``target = draft + d2t[draft]``."""
    ids = read_ids(source, name, count) + np.arange(count)
    check_range(source, name, ids, vocabulary)
    if (falls := np.diff(ids) <= 0).any():
        draft = int(np.argmax(falls))
        raise JspecError(
            f"{source.path}: {name} maps draft tokens {draft} and {draft + 1} to {ids[draft]} and "
            f"{ids[draft + 1]}, which should increase"
        )
    return ids
