"""Loading the target that a name means. Targets are loaded once and kept for the next call."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jspec.errors import JspecError
from jspec.models import decoder
from jspec.pallas.select import PLAIN, Kernels, select
from jspec.text.tokenizer import load_tokenizer
from jspec.text.tokenizer import stop_token_ids as read_stop_token_ids
from jspec.types import Model, Params
from jspec.weights import smollm2
from jspec.weights.load import Checkpoint, load_checkpoint


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target: what `jspec.generate` needs of it.

    ``checkpoint.config`` is the model's; ``params`` have the tree of ``family.weights(config)``.
    """

    model: Model
    params: Params = field(repr=False)
    tokenizer: Any = field(repr=False)
    stop_token_ids: tuple[int, ...]
    checkpoint: Checkpoint = field(repr=False)
    dtype: str
    kernels: Kernels = field(default=PLAIN, repr=False)


def load(target: str = "smollm2", dtype: str = "auto", kernels: str = "auto") -> Target:
    """Load a target, once: the next call with the same arguments gives the same one.

    Args:
        target: "smollm2", a Hugging Face or Orbax folder (`jspec.weights.orbax`), or a GGUF file
            with tokenizer files (tokenizer.json, tokenizer_config.json) beside it.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on CPUs, whose
            one-row bfloat16 products are slow, bfloat16 elsewhere.
        kernels: "auto", those of the first device (`jspec.pallas.select`), or "plain".

    Returns:
        The `Target`: model, params, tokenizer and stop token ids.

    Raises:
        JspecError: a path that is not there, a model that is not supported, files that do not fit.

    >>> load("no such folder")
    Traceback (most recent call last):
    jspec.errors.JspecError: no such folder does not exist: give a Hugging Face folder or a .gguf file
    """
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return _load(smollm2.ensure() if target == "smollm2" else target, dtype, kernels_of(kernels))


@functools.lru_cache(maxsize=2)
def _load(folder: Any, dtype: str, kernels: Kernels) -> Target:
    """`load` of names that are settled, so that each is loaded once."""
    loaded = load_checkpoint(folder, dtype)
    tokenizer = load_tokenizer(loaded.home)
    if jax.default_backend() == "cpu":
        config, params = decoder.join_qkv(loaded.config, loaded.params)
        loaded = replace(loaded, config=config, params=params)
    model = loaded.family.make(loaded.config, dtype=dtype, **kernels.of_model())
    stop = read_stop_token_ids(loaded.home, tokenizer)
    return Target(model, loaded.params, tokenizer, stop, loaded, dtype, kernels)


def kernels_of(name: str) -> Kernels:
    """The kernels of a name, "auto" or "plain"; `JspecError` for any other."""
    if name not in ("auto", "plain"):
        raise JspecError(f"kernels = {name!r}: choose auto or plain")
    return select() if name == "auto" else PLAIN
