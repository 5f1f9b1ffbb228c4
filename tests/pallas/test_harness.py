"""The scripts around the kernels: what `aot.py` reads and reports, and `gpu_check.py` on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jspec.pallas import compat

ROOT = Path(__file__).parents[2]
PROGRAM = """
  %copy.1 = f32[5,128]{1,0:T(8,128)} copy(%p0)
  %copy.2 = f32[5,128]{1,0:T(8,128)S(1)} copy(%p0)
  ROOT %t = bf16[640]{0} transpose(%p1), dimensions={0}
  %start = (bf16[8,80]{1,0}, bf16[8,80]{1,0}, u32[]) copy-start(%p2)
  %small = f32[5,127]{1,0} pad(%p3, %zero), padding=0_0x0_1
  %sum = f32[5,128]{1,0} add(%copy.1, %copy.2)
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


class Program:
    """A compiled program that prints so."""

    def __init__(self, text: str | Exception):
        self.text = text

    def as_text(self) -> str:
        if isinstance(self.text, Exception):
            raise self.text
        return self.text


def test_copies_are_counted(script):
    aot = script("aot")
    assert aot.count_copies(Program(PROGRAM), 640) == 3  # not the prefetch, not the small one
    assert aot.count_copies(Program(PROGRAM), 635) == 4
    assert aot.count_copies(Program(PROGRAM), 641) == 0
    assert aot.count_copies(Program(RuntimeError("async-update should have 1 operand")), 1) is None
    with pytest.raises(RuntimeError, match="other"):
        aot.count_copies(Program(RuntimeError("other")), 1)


@pytest.fixture
def run_aot(script, monkeypatch, capsys, tmp_path):
    """Run `aot.py` with a worker that says so; gives its exit code and output."""
    aot = script("aot")

    def run(worker: str, missing=lambda platform: ""):
        (tmp_path / "aot.py").write_text(worker)
        monkeypatch.setattr(aot, "__file__", str(tmp_path / "aot.py"))
        monkeypatch.setattr(aot, "missing", missing)
        monkeypatch.setattr(aot, "toolkit", lambda: "")
        monkeypatch.setattr(sys, "argv", ["aot.py", "--chip", "v5e"])
        return aot.main(), capsys.readouterr().out

    return run


def test_aot_reports_what_its_workers_say(run_aot):
    row = ["a kernel", "v5e", 1.5, 2_000_000, 0, 0, 3, ""]
    said = f"print({json.dumps(row[0])!r}); print({json.dumps(row)!r})"
    code, out = run_aot(said)
    assert code == 0 and "a kernel" in out and out.rstrip().endswith("3 ok")
    code, out = run_aot(said.replace('""]', '"too much"]'))
    assert code == 1 and "FAILED: too much" in out


def test_a_compiler_that_ends_the_worker_is_a_failure(run_aot):
    code, out = run_aot("import os; print('\"a kernel\"', flush=True); os.abort()")
    assert code == 1 and "a kernel" in out and "the compiler ended with -6" in out


def test_what_is_missing_is_skipped_with_its_reason(run_aot):
    code, out = run_aot("", missing=lambda platform: f"no {platform} here")
    assert code == 0 and "v5e: skipped, no tpu here" in out


def test_every_case_has_inputs_and_a_name_of_its_own(script):
    cases = script("kernel_cases").CASES
    assert len({(case.name, case.platform) for case in cases}) == len(cases)
    assert {case.platform for case in cases} == {"tpu", "gpu"}
    assert {case.platform for case in cases if case.fails} == {"tpu", "gpu"}


@pytest.fixture
def gpu_check(script, monkeypatch, capsys):
    module = script("gpu_check")

    def run(*words: str):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
        return module.main(), capsys.readouterr().out

    run.module = module
    return run


def test_without_a_gpu_nothing_is_checked(gpu_check):
    code, out = gpu_check()
    assert code == 2 and "there is no GPU here" in out


def test_a_dry_run_checks_counts_and_times(gpu_check):
    code, out = gpu_check("--dry-run", "--only", "page sums", "--repeat", "1")
    found = json.loads(out.splitlines()[1])
    assert code == 0 and found["ok"] and found["difference"] == 0
    assert found["bytes"] == 3 * (16 + 8) * 128 * 4  # the pages in, their sums out
    assert found["us"] > 0 and found["of_plain"] > 0


RECENT = pytest.mark.skipif(
    not compat.INTERPRETS_TRANSPOSED, reason="the interpreter of jax 0.10 cannot, or takes minutes"
)


@pytest.mark.parametrize(
    "name",
    [
        "commit",
        "gumbel_argmax bfloat16",
        *(pytest.param(n, marks=RECENT) for n in ("row_stats bfloat16", "attention")),
    ],
)
def test_the_kernels_pass_a_dry_run(name, gpu_check):
    code, out = gpu_check("--dry-run", "--only", name, "--repeat", "1")
    found = json.loads(out.splitlines()[1])
    assert code == 0 and found["ok"] and found["bytes"] > 0


def test_a_wrong_kernel_fails_the_check(gpu_check, monkeypatch):
    case = next(c for c in gpu_check.module.CASES if c.name == "page sums")
    wrong = case._replace(reference=lambda x: case.reference(x).at[1, 0, 0].add(1))
    monkeypatch.setattr(gpu_check.module, "CASES", [wrong])
    code, out = gpu_check("--dry-run", "--repeat", "1")
    assert code == 1 and not json.loads(out.splitlines()[1])["ok"]
    broken = case._replace(kernel=lambda x, interpret: 1 / 0)
    monkeypatch.setattr(gpu_check.module, "CASES", [broken])
    code, out = gpu_check("--dry-run", "--repeat", "1")
    assert code == 1 and "ZeroDivisionError" in out


def test_differences(gpu_check):
    nan, inf = jnp.nan, jnp.inf
    worst = gpu_check.module.worst
    assert worst({"a": jnp.array([1.0, nan, -inf])}, {"a": jnp.array([1.5, nan, -inf])}) == 0.5
    assert worst(jnp.array([1.0, nan]), jnp.array([1.0, 2.0])) == inf
    assert worst(jnp.array([inf]), jnp.array([-inf])) == inf
    assert worst(jnp.zeros(2), jnp.zeros(3)) == inf
    assert worst(jnp.zeros(3), jnp.zeros(3)) == 0
