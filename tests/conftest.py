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


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drop compiled programs after each file: a process may map only so many pieces of memory."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()


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
