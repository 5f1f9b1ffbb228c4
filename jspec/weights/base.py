"""Where tensors come from, and reading the params that a model describes.

A source lists its tensors (name -> `Tensor`) and reads a block of rows of one. Weights
are read by blocks into the memory that the array keeps, so that loading needs little
more than the weights themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.errors import JspecError
from jspec.files import listed
from jspec.models.layers import Weight
from jspec.types import Params

DTYPES = ("float32", "bfloat16", "float16")
SAFETENSORS_DTYPES = ("F32", "BF16", "F16")  # the same ones
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


def load_params(
    weights: Any, source: Source, dtype: Any = jnp.float32, ignore: Collection[str] = ()
) -> Params:
    """Read every `Weight` of a tree from a source, as ``dtype`` arrays on the default device.

    ``dtype``: see `load_dtype`. ``ignore``: names of tensors that the source may hold beside them.
    Raises one `JspecError` that names every missing, unknown, misshapen or unreadable tensor.
    """
    leaves = stored_weights(weights)
    _check(leaves, source, ignore)
    short = dict(zip(SAFETENSORS_DTYPES, DTYPES, strict=True))
    stored = {short.get(source.tensors[weight.source].dtype, "") for weight in leaves}
    dtype = load_dtype(dtype, stored)
    return jax.tree.map(lambda weight: _read(weight, source, dtype), weights)


def stored_weights(weights: Any) -> list[Weight]:
    """The weights of a tree as a checkpoint has them."""
    return [part for weight in jax.tree.leaves(weights) for part in weight.stored]


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


def file_shape(weight: Weight) -> tuple[int, ...]:
    return weight.shape[::-1] if weight.transpose else weight.shape


def _check(weights: list[Weight], source: Source, ignore: Collection[str]) -> None:
    """Raise one error for everything in the files that does not fit the model."""
    wanted, held = {weight.source: file_shape(weight) for weight in weights}, source.tensors
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
    out, first = _aligned(weight.shape, dtype), 0
    for part in weight.stored:
        own = out[..., first : first + part.shape[-1]]
        first, rows = first + part.shape[-1], file_shape(part)[0]
        target = own.T if part.transpose else own
        for start in range(0, rows, BLOCK):
            stop = min(start + BLOCK, rows)
            target[start:stop] = source.rows(part.source, start, stop)
    # Waiting bounds the host memory where the device is not the CPU.
    return jax.block_until_ready(jax.device_put(out))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that JAX, on a CPU, takes over without a copy: it wants 64-byte alignment."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
