"""What a user did wrong, said in one line."""

from __future__ import annotations

import importlib
from types import ModuleType


class JspecError(ValueError):
    """A user's mistake: the message says in one line what is wrong, where, and what would be right."""


class CannotWrite(JspecError):
    """A file or folder that cannot be written; the message names it."""


def optional(module: str, extra: str = "hf") -> ModuleType:
    """Import a module that only an extra installs; `JspecError` names the command if it is absent."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Absent is the module or a package around it; else it is there and broken: hide nothing.
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise JspecError(f"the package {module!r} is not installed: pip install 'jspec[{extra}]'") from None


def positive(name: str, value: int) -> int:
    """The value, if it is a whole number of at least 1; else `JspecError`.

    >>> positive("chunk", 8)
    8
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JspecError(f"{name} = {value!r} should be a whole number of at least 1")
    return value
