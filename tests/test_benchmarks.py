"""The benchmark scripts run and count right at tiny size; nothing here is timed."""

import importlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.bench.measure import Result
from jspec.sampling.drafters import DraftConfig
from jspec.serve.metrics import Metrics
from tests import tiny

SCRIPTS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Import a script as Python does when it is run."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def test_all_scripts_import_without_optional_packages(script):
    for path in sorted(SCRIPTS.glob("*.py")):
        script(path.stem)


@pytest.mark.parametrize("fused", [False, True])
def test_the_handwritten_decoder_writes_the_same_text(script, tmp_path, fused):
    handwritten = script("handwritten")
    target = jspec.load(str(tiny.folder(tmp_path / "model")), "float32")
    config, prompt, new = target.checkpoint.config, [3, 1, 4, 1, 5], 20
    params = handwritten.fuse(target.params) if fused else target.params
    state = handwritten.start(config, prompt, 64)
    state = handwritten.make(config)(params, state, len(prompt), len(prompt) + new - 1)
    own = jspec.speculative_sample(
        target.params, jnp.array([prompt]), target=target.model, key=[0], max_new_tokens=new, temperature=0
    )
    assert state.tokens[len(prompt) : len(prompt) + new].tolist() == own.tokens[0].tolist()


def test_expected_accept_lengths(script):
    accept = script("accept_length")
    p, q = accept.distributions(0.7)
    assert np.minimum(p, q).sum() == pytest.approx(0.7) and q.sum() == pytest.approx(1)
    assert accept.expected("token", p, q, 3) == pytest.approx((1 - 0.7**4) / 0.3)
    for verifier in ("block", "coupled"):  # one draft: block is token, coupled is no better
        assert accept.expected(verifier, p, q, 1) <= 1.7 + 1e-9
    assert accept.expected("block", p, q, 1) == pytest.approx(1.7)
    assert accept.expected("block", p, q, 4) > accept.expected("token", p, q, 4)
    assert accept.expected("coupled", p, p, 4) == pytest.approx(5)


def test_the_loop_meets_the_distribution(script):
    accept = script("accept_length")
    p, q = accept.distributions(0.8)
    mean, tokens = accept.measure("token", p, q, 2, tokens=20_000, rows=256)
    assert tokens >= 20_000 * 0.95
    assert mean == pytest.approx(accept.expected("token", p, q, 2), rel=0.03)


def test_a_perfect_draft_keeps_all(script, tmp_path):
    rounds = script("round")
    target = jspec.load(str(tiny.folder(tmp_path / "model")), "float32")
    seconds, tokens = rounds.round_of_the_loop(target, [3, 1, 4], 96, 1, "greedy")()
    assert tokens == 2 and seconds > 0
    assert rounds.passes_of_a_round(target.model, target.params, 96, 1)() > 0


def test_spec_bench_reads_and_reports(script, tmp_path):
    spec_bench = script("spec_bench")
    lines = [{"category": "rag", "turns": [f"question {i}", "more"]} for i in range(6)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"category": "x", "turns": ["y"]}])))
    assert spec_bench.questions(tmp_path / "q.jsonl", "rag", 3) == ["question 0", "question 2", "question 4"]
    with pytest.raises(SystemExit, match="it has rag, x"):
        spec_bench.questions(tmp_path / "q.jsonl", "prose", 3)
    result = Result(DraftConfig("ngram", 4), ratios=[1.0, 2.5, 1.2, 2.1], seconds=1.0, plain_seconds=2.0)
    result.tokens, result.row_passes, result.passes, result.wide, result.plain_passes = 30, 20, 20, 5, 30
    result.tokens_per_second, result.accepted, result.proposed = [1.0], [3], [5]
    assert spec_bench.of_prompts(result, 2) == pytest.approx([1.1, 2.3])
    assert "| 1.10 / 1.70 / 2.30 | 1 | 0 | 1.50 |" in spec_bench.row("rag", result, 2)
    metrics = [Metrics(9, 20, 20, 0, 0, 0), Metrics(9, 30, 10, 10, 40, 20)]
    assert spec_bench.predicted(metrics[1], 1.5) == pytest.approx(2.0)
    row = spec_bench.counted("rag", DraftConfig("ngram", 4), metrics, 1.5)
    assert "| 1.43 | 1.00 / 1.50 / 2.00 | 1 | 0 | 1.67 | 33% |" in row


def test_a_missing_engine_is_left_out(script, capsys):
    assert not script("engines").installed("no_such_engine")
    assert "left out, not installed: no_such_engine" in capsys.readouterr().out
