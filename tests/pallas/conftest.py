"""Interpreted kernels: every test of this folder fails if one of them raced."""

from __future__ import annotations

import pytest

from jspec.pallas import compat


@pytest.fixture(autouse=True)
def no_races():
    compat.reset_interpreters()
    yield
    raced = compat.races_found()
    compat.reset_interpreters()
    assert not raced, "the interpreter saw a race"
