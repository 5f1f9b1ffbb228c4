"""Interpreted kernels: every test of this folder fails if the interpreter saw a data race in one."""

from __future__ import annotations

import jax
import pytest

from jspec.pallas import compat


@pytest.fixture(autouse=True)
def no_races():
    compat.reset_interpreters()
    yield
    raced = compat.races_found()
    compat.reset_interpreters()
    assert not raced, "the interpreter saw a data race"


@pytest.fixture(scope="module")
def quick_compilation():
    """An interpreted kernel is compiled at each call, and for each core: that is the time such tests take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
