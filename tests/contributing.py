"""What CONTRIBUTING.md tells people to write: whole files, edits of files, and programs that use them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)

FILES = {
    match[1]: code
    for kind, code in BLOCKS
    if kind == "python" and (match := re.match(r"# (jspec/[\w/]+\.py)\n", code))
}
"""New files: path -> content."""

PROGRAMS = [code for kind, code in BLOCKS if kind == "python" and not code.startswith("# jspec/")]
"""Programs that use what was added, in their order."""


def edits() -> dict[str, list[tuple[str, str]]]:
    """Edits of files that are there: path -> what stands there and what is to stand there, in pairs."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, block in BLOCKS:
        if kind != "diff":
            continue
        head, *lines = block.splitlines(keepends=True)
        path = head.removeprefix("--- ").strip()
        for hunk in "".join(lines).split("@@\n"):
            each = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in each if line[0] in " -")
            new = "".join(line[1:] for line in each if line[0] in " +")
            found.setdefault(path, []).append((old, new))
    return found


def added(path: str) -> str:
    """The lines that the edits of a file add, without those around them."""
    lines = [
        line[1:]
        for kind, block in BLOCKS
        if kind == "diff" and block.startswith(f"--- {path}\n")
        for line in block.splitlines(keepends=True)
        if line.startswith("+")
    ]
    return "".join(lines)


def edited(path: str, text: str) -> str:
    """A file's text with the edits made; each has to find its place, once."""
    for old, new in edits()[path]:
        assert text.count(old) == 1, f"CONTRIBUTING.md: {path} has no such place:\n{old}"
        text = text.replace(old, new)
    return text


def module(path: str) -> ModuleType:
    """A new file as the module that it would be."""
    result = ModuleType(path.removesuffix(".py").replace("/", "."))
    sys.modules[result.__name__] = result  # while it is made: dataclasses look there
    try:
        exec(compile(FILES[path], path, "exec"), vars(result))
    finally:
        del sys.modules[result.__name__]
    return result
