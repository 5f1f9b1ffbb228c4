"""What names mean: loading the target.

Targets are loaded once and kept for the next call.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax

from jspec import checkpoint, smollm2, text
from jspec.errors import JspecError
from jspec.models import decoder
from jspec.pallas.select import PLAIN, Kernels, select
from jspec.types import Model, Params


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target: what `generate` needs of it."""

    model: Model
    params: Params
    tokenizer: Any
    stop_ids: tuple[int, ...]
    checkpoint: checkpoint.Checkpoint
    dtype: str
    kernels: Kernels = PLAIN


def load(target: str = "smollm2", dtype: str = "auto", kernels: str = "auto") -> Target:
    """Load a target: "smollm2", a Hugging Face or Orbax folder (`jspec.orbax_folder`), or a
    GGUF file with tokenizer files (tokenizer.json, tokenizer_config.json) beside it.

    ``dtype``: "float32", "bfloat16", "float16", or "auto": float32 on CPUs, whose
    one-row bfloat16 products are slow, bfloat16 elsewhere. ``kernels``: "auto", those of
    the first device (`jspec.pallas.select`), or "plain". Raises `JspecError`.
    """
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return _load(smollm2.ensure() if target == "smollm2" else target, dtype, kernels_of(kernels))


@functools.lru_cache(maxsize=2)
def _load(folder: Any, dtype: str, kernels: Kernels) -> Target:
    """`load` of names that are settled, so that each is loaded once."""
    loaded = checkpoint.load(folder, dtype)
    tokenizer = text.load_tokenizer(loaded.home)
    if jax.default_backend() == "cpu":
        loaded = dataclasses.replace(loaded, params=decoder.join_qkv(loaded.params))
    model = loaded.family.make(loaded.config, dtype=dtype, **kernels.of_model())
    return Target(
        model, loaded.params, tokenizer, text.stop_ids(loaded.home, tokenizer), loaded, dtype, kernels
    )


def kernels_of(name: str) -> Kernels:
    """The kernels of a name, "auto" or "plain"; `JspecError` for any other."""
    if name not in ("auto", "plain"):
        raise JspecError(f"kernels = {name!r}: choose auto or plain")
    return select() if name == "auto" else PLAIN


def positive(name: str, value: int) -> int:
    """The value, if it is a whole number of at least 1; else `JspecError`."""
    if not isinstance(value, int) or value < 1:
        raise JspecError(f"{name} = {value!r} should be a whole number of at least 1")
    return value
