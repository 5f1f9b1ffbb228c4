"""The product of all shapes of a kernel: slow tests, beside the cases that are tested by default."""

from __future__ import annotations

import pytest


def wide(cases: list[tuple]) -> list:
    """Each case, a tuple of arguments, as a slow test."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
