"""Settings that must stand before jax is imported; subprocesses inherit them."""

import gc
import os
import sys
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[1] / ".cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Most of the suite's time is compilation, and most programs are those of the last run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ["HF_HUB_OFFLINE"] = "1"


MAPS = Path("/proc/self/maps")
MAX_MAPS = 30_000  # Linux allows a process about twice as many, and a compiled program has several


@pytest.fixture(scope="module", autouse=True)
def few_programs(request):
    """Keep compiled programs for the next file, unless memory forbids it or a test changed the library."""
    yield
    import jax

    crowded = not MAPS.exists() or MAPS.read_bytes().count(b"\n") > MAX_MAPS
    if crowded or getattr(request.module, "changed_the_library", False):
        jax.clear_caches()
        once_forget()
        gc.collect()


def once_forget():
    from jspec import once

    once.forget()


@pytest.fixture(autouse=True)
def nothing_old(request):
    """A test that changes the library must not meet what was built before, nor leave its own."""
    changes = "monkeypatch" in request.fixturenames and "jspec" not in request.fixturenames
    if changes:
        request.module.changed_the_library = True
        once_forget()
    yield
    if changes:
        once_forget()


@pytest.fixture
def jspec(monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""
    from jspec import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jspec", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
