"""Fused verification with the vocabulary sharded over eight devices.

The devices must be there before jax starts, so the checks are a program of their own
(`sharded_checks.py`), run once; each of its checks is a test here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = "token_tree foreign_ids_in_a_tree exchange_of_a_tree gathered_logits_are_refused refusals".split()
SLOW = (
    "row_stats_float32 row_stats_bfloat16 noise token_drawn_chain coupled_tree adjusted bad_rows "
    "foreign_ids a_new_step_behind_the_temperature a_new_step_before_the_temperature "
    "drafts_without_a_distribution exchange_of_plain_code_is_refused a_bisection_is_refused "
    "drawn_trees_go_by_plain_code "
    "greedy_chain block_drawn_chain drafts_without_a_distribution_in_a_block a_batch_sharded_too "
    "exchange_of_the_block_verifier exchange_of_the_coupled_verifier"
).split()


def faults(names: list[str]) -> dict[str, str | None]:
    # Little optimisation: compiling is most of the time.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.sharding.sharded_checks", *names]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def fast():
    return faults(CHECKS)


@pytest.fixture(scope="module")
def slow():
    return faults(SLOW)


@pytest.mark.parametrize("name", CHECKS)
def test_sharded(fast, name):
    assert not fast[name], fast[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_sharded_slow(slow, name):
    assert not slow[name], slow[name]


def test_every_check_is_run():
    text = (ROOT / "tests/sharding/sharded_checks.py").read_text()
    assert {*CHECKS, *SLOW} == set(re.findall(r"^def check_(\w+)\(\):", text, re.MULTILINE))
