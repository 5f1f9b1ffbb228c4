"""Orbax folders: config.json, the tokenizer's files, and the params as Orbax writes them.

::

    config.json     as in a Hugging Face folder
    params/         an Orbax checkpoint of the tree of params, as StandardCheckpointer saves it
    params.json     the size of each of its files

A checkpoint that a training loop saved into ``params/`` is read too, without params.json.
With it a cut copy is refused before Orbax sees it, whose readers then fail in many words
and in other threads. Orbax would cast any dtype and keep silent: what is stored is
compared with the model before anything is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jspec.errors import CannotWrite, JspecError, optional
from jspec.files import listed, new_folder, read_json, refuse_pointer
from jspec.types import Params
from jspec.weights.base import DTYPES, load_dtype
from jspec.weights.huggingface import write_config

ORBAX = "params"  # the folder beside config.json that holds what Orbax wrote
SIZES = "params.json"


def save(folder: str | Path, config: Mapping[str, Any], params: Params) -> None:
    """Write params and config.json as a new Orbax folder, whole or not at all.

    ``config``: the content of config.json. Raises `JspecError` if the folder cannot be
    written or already holds something, or if Orbax is not installed.
    """
    with new_folder(folder) as temporary:
        write(temporary, config, params)


def write(folder: Path, config: Mapping[str, Any], params: Params) -> None:
    """The same, into an existing folder."""
    ocp = optional("orbax.checkpoint", "orbax")
    write_config(folder, config)
    where = folder.absolute() / ORBAX  # Orbax takes no other paths
    try:
        with _checkpointer(ocp) as checkpointer:
            checkpointer.save(where, args=ocp.args.StandardSave(params))
    except Exception as error:  # OSError, ValueError and others, by what the disk refuses
        raise CannotWrite(f"cannot write {where}: {_first_line(error)}") from error
    (folder / SIZES).write_text(json.dumps(_sizes(where), indent=0, sort_keys=True) + "\n")


def restore(folder: Path, weights: Any, dtype: Any = jnp.float32, sharding: Any = None) -> Params:
    """Read the params of an Orbax folder as ``dtype`` arrays.

    Args:
        folder: has ``params/``.
        weights: the tree of `jspec.models.layers.Weight` that the folder should hold.
        dtype: float32, bfloat16, float16, or None: `jspec.weights.base.load_dtype`.
        sharding: one `jax.sharding.Sharding`, or one for each weight in a tree of the
            same structure; default: all on the default device.

    Raises one `JspecError` that names every missing, unknown, misshapen or unsupported
    array, or that says which file is absent or cut short.
    """
    ocp = optional("orbax.checkpoint", "orbax")
    where = folder.absolute() / ORBAX
    _check_sizes(folder, where)
    with _checkpointer(ocp) as checkpointer:
        stored = _stored(checkpointer, where)
        _check(where, weights, stored)
        dtype = load_dtype(dtype, {array.dtype.name for array in stored.values()})
        if sharding is None:
            sharding = jnp.zeros(()).sharding
        if isinstance(sharding, jax.sharding.Sharding):
            sharding = jax.tree.map(lambda _, one=sharding: one, weights)

        def like(weight, sharding):
            return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=sharding)

        try:
            wanted = jax.tree.map(like, weights, sharding)
            return checkpointer.restore(where, args=ocp.args.StandardRestore(wanted))
        except Exception as error:  # each kind of damage fails in its own way
            raise _corrupt(where, error) from error


def _checkpointer(ocp: ModuleType) -> Any:
    """StandardCheckpointer without its threads: those go on writing after a save has failed."""
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _stored(checkpointer: Any, where: Path) -> dict[str, Any]:
    """Orbax's description (shape, dtype) of each array, by its place in the tree."""
    try:
        tree = getattr(checkpointer.metadata(where).item_metadata, "tree", None)
    except Exception as error:
        raise _corrupt(where, error) from error
    if not tree:
        raise JspecError(f"{where} is corrupt or no Orbax checkpoint: it does not say which arrays it holds")
    return _by_place(tree)


def _by_place(tree: Any) -> dict[str, Any]:
    """``{"layers": [{"q": x}]}`` -> ``{"layers/0/q": x}``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _check(where: Path, weights: Any, stored: dict[str, Any]) -> None:
    """Raise one error for everything in the checkpoint that does not fit the model."""
    wanted = _by_place(weights)
    used = sorted(wanted.keys() & stored.keys())
    shapes = {name: tuple(getattr(stored[name], "shape", None) or ()) for name in used}
    dtypes = {name: str(getattr(stored[name], "dtype", "no array")) for name in used}
    problems = {
        "missing arrays": sorted(wanted.keys() - stored.keys()),
        "unknown arrays": sorted(stored.keys() - wanted.keys()),
        "misshapen arrays": [
            f"{n} is {list(shapes[n])}, not {list(wanted[n].shape)}"
            for n in used
            if shapes[n] != wanted[n].shape
        ],
        "arrays of an unsupported dtype": [f"{n} is {dtypes[n]}" for n in used if dtypes[n] not in DTYPES],
    }
    if text := "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names):
        raise JspecError(f"{where} does not hold the model that its config describes: {text}")


def _sizes(where: Path) -> dict[str, int]:
    """The bytes of every file below a folder."""
    return {p.relative_to(where).as_posix(): p.stat().st_size for p in where.rglob("*") if p.is_file()}


def _check_sizes(folder: Path, where: Path) -> None:
    """Raise for files that are absent or of another size than when they were written."""
    if not (folder / SIZES).is_file():
        return
    found = _sizes(where)
    wrong = [name for name, size in read_json(folder / SIZES).items() if found.get(name) != size]
    for name in wrong:
        if name in found:
            refuse_pointer(where / name)
    if wrong:
        raise JspecError(f"{where} is corrupt or cut short: {listed(sorted(wrong))}")


def _corrupt(where: Path, error: Exception) -> JspecError:
    return JspecError(f"{where} is corrupt or no Orbax checkpoint: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
