"""The programs in examples/ run, on a tiny target; the ones with real weights are slow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import tiny
from tests.contributing import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("tiny"))


def run(name: str, *arguments) -> str:
    command = [sys.executable, f"examples/{name}.py", *map(str, arguments)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stderr == ""
    return found.stdout


def test_every_example_is_listed_and_run_here():
    text = (ROOT / "examples" / "README.md").read_text()
    source = (ROOT / "tests" / "test_examples.py").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"`{path.name}`" in text and f'run("{path.stem}"' in source


def test_offline_prompts(folder, tmp_path):
    """Three prompts in batches of two: in their order, and the same in batches of one."""
    prompts = ["the cat, the cat", "abc", "a dog and a dog"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    options = ("--target", folder, "--max-new-tokens", 8, "--temperature", 1)
    out = run("offline_prompts", tmp_path / "p.jsonl", tmp_path / "a.jsonl", *options, "--batch", 2)
    assert out.startswith("3 answers, 24 tokens in ")
    answers = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert all(len(answer["answer"]) > 0 for answer in answers)


def test_rollouts_learn_without_compiling():
    lines = run("rollouts", "--steps", 12).splitlines()
    assert lines[-1] == "programs compiled after the first step: 0"
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in lines[:-1]]
    assert len(rewards) == 12 and rewards[-1] > rewards[0] + 0.2


def test_your_own_drafter(folder):
    out = run("your_own_drafter", "--target", folder, "--max-new-tokens", 16, "--rows", 300)
    assert "greedy: 16 tokens equal, 0 faults" in out and "χ² of the loop: smallest p-value" in out


@pytest.mark.slow
def test_with_real_weights(tmp_path):
    (tmp_path / "p.jsonl").write_text('"Count from 1 to 5."\n')
    out = run("offline_prompts", tmp_path / "p.jsonl", tmp_path / "a.jsonl", "--max-new-tokens", 16)
    assert out.startswith("1 answers, 16 tokens in ")
    lines = run("rollouts", "--target", "smollm2", "--steps", 2, "--batch", 2).splitlines()
    assert lines[-1] == "programs compiled after the first step: 0"
    assert "0 faults" in run("your_own_drafter", "--max-new-tokens", 24, "--rows", 300)
