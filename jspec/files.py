"""Files and folders: what is written appears whole or not at all, what is read is named when it is wrong."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from jspec.errors import CannotWrite, JspecError

LISTED = 20  # names of one kind that an error spells out
POINTER = b"version https://git-lfs.github.com/spec/"  # how a git-lfs pointer begins


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Give a temporary folder that takes its final name only if the block ends well.

    Raises `CannotWrite`, a `JspecError`, when it cannot be written or when the name is taken.
    """
    folder = Path(folder).expanduser()
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, folder)  # refuses a folder that is not empty
    except (OSError, SafetensorError) as error:
        refuse_taken(folder)
        raise CannotWrite(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_taken(folder: Path) -> None:
    """Raise `CannotWrite` for a folder that is there and holds something."""
    if folder.is_dir() and any(folder.iterdir()):
        raise CannotWrite(f"{folder} already exists and is not empty: choose another folder")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; `JspecError` names the file if it is absent or something else.

    >>> read_json(Path("no such file"))
    Traceback (most recent call last):
    jspec.errors.JspecError: cannot read no such file: No such file or directory
    """
    try:
        refuse_pointer(path)
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors put a mark before it
    except OSError as error:
        raise JspecError(f"cannot read {path}: {error.strerror}") from None
    except JspecError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or absurdly deep
        raise JspecError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise JspecError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def refuse_pointer(path: Path) -> None:
    """Raise `JspecError` for a file in whose place git has left the few lines that stand for it."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise JspecError(f"{path} is a git-lfs pointer, not the file itself: run git lfs pull")


def listed(names: list[str]) -> str:
    """The names as one text, of which there may be only so many."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
