"""Prompts from a file: JSON lines, or plain text.

A line is ``{"prompt": text}``, ``{"turns": [text, ...]}`` (Spec-Bench; the first turn is
taken), ``{"messages": [{"role", "content"}, ...]}``, or a JSON string.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jspec.errors import JspecError
from jspec.files import refuse_pointer
from jspec.text.tokenizer import Prompt

LISTED = 10  # bad lines that an error spells out


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read up to ``limit`` prompts of a ``.jsonl`` file, spread evenly over it; else the whole file is one.

    Raises `JspecError` for a file that is missing, empty or not UTF-8, and for lines that
    hold no prompt, with their numbers.
    """
    path = Path(path).expanduser()
    content = read_text(path)
    if path.suffix != ".jsonl":
        return [content]
    prompts, faults = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                prompts.append(_prompt(line))
            except JspecError as error:
                faults.append(f"line {number}: {error}")
    if faults:
        more = f"; and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise JspecError(f"{path}: {'; '.join(faults[:LISTED])}{more}")
    if not prompts:
        raise JspecError(f"{path} holds no prompt")
    count = len(prompts) if limit is None else min(limit, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def read_text(path: Path) -> str:
    """The text of a prompt file; `JspecError` if there is none or it is not UTF-8."""
    try:
        refuse_pointer(path)
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JspecError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise JspecError(f"cannot read the prompt file {path}: {error.strerror}") from None


def _prompt(line: str) -> Prompt:
    """The prompt of one line; `JspecError` says what is wrong with it."""
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise JspecError(f"no JSON ({error.msg} at character {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:  # a number or a depth that no prompt has
        raise JspecError(f"no JSON ({error})") from None
    if isinstance(value, dict):
        keys = [key for key in ("prompt", "turns", "messages") if key in value]
        if len(keys) != 1:
            raise JspecError("should have one of 'prompt', 'turns' and 'messages'")
        value = value[keys[0]]
        if keys[0] == "turns" and isinstance(value, list) and value:
            value = value[0]
        if keys[0] == "messages" and isinstance(value, list) and value:
            return value
    if not isinstance(value, str) or not value:
        raise JspecError("the prompt should be a text of at least one character")
    return value
