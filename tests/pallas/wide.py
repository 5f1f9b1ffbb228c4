"""The product of all shapes of a kernel: a sixth of it in `make test-slow`, the rest in `make test-wide`."""

from __future__ import annotations

import pytest


def wide(cases: list[tuple]) -> list:
    """Each case, a tuple of arguments, with its mark."""
    return [
        pytest.param(*case, marks=pytest.mark.wide if index % 6 else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
