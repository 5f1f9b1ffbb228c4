"""Converting a model: from whatever `jspec.load` reads to an Orbax or a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import jax

from jspec.errors import JspecError
from jspec.files import new_folder, refuse_taken
from jspec.text.tokenizer import TOKENIZER_FILES
from jspec.weights import orbax, smollm2
from jspec.weights.huggingface import write_params
from jspec.weights.load import load_checkpoint

FORMS = ("orbax", "hf")
COMPANIONS = (
    *TOKENIZER_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What may lie beside weights and says how text becomes tokens, and where a text ends."""


class Converted(NamedTuple):
    """What was written."""

    folder: Path
    form: str
    dtype: str
    parameters: int
    size: int  # bytes of all files
    copied: tuple[str, ...]  # tokenizer and generation files


def convert(source: str | Path, dest: str | Path, to: str = "orbax", dtype: str = "auto") -> Converted:
    """Write the model of ``source`` into the new folder ``dest``, whole or not at all.

    Args:
        source: "smollm2", a Hugging Face folder, a ``.gguf`` file (or a folder of one), or
            an Orbax folder.
        dest: a folder that is not there yet, or empty.
        to: "orbax" or "hf".
        dtype: "float32", "bfloat16", "float16", or "auto": the one that all tensors are stored
            in, else float32; so nothing is lost.

    Tokenizer and generation files that lie beside the weights are copied. Raises
    `JspecError` for a source that cannot be loaded or a folder that cannot be written.
    """
    if to not in FORMS:
        raise JspecError(f"cannot convert to {to!r}: choose one of {', '.join(FORMS)}")
    dest = Path(dest).expanduser()
    refuse_taken(dest)  # before the work, not after it
    path = smollm2.ensure() if str(source) == "smollm2" else source
    loaded = load_checkpoint(path, None if dtype == "auto" else dtype)
    arrays = jax.tree.leaves(loaded.params)
    name = arrays[0].dtype.name
    config = {key: value for key, value in loaded.json.items() if key != "torch_dtype"} | {"dtype": name}
    with new_folder(dest) as temporary:
        if to == "orbax":
            orbax.write(temporary, config, loaded.params)
        else:
            weights = loaded.family.weights(loaded.config)
            write_params(temporary, config, loaded.params, weights)
        copied = tuple(name for name in COMPANIONS if (loaded.home / name).is_file())
        for companion in copied:
            shutil.copyfile(loaded.home / companion, temporary / companion)
        size = sum(p.stat().st_size for p in temporary.rglob("*") if p.is_file())
    return Converted(dest, to, name, sum(array.size for array in arrays), size, copied)
