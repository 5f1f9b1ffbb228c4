"""The benchmark's counts and arithmetic; nothing here depends on how fast the machine is."""

import json

import pytest

from jspec.bench.measure import Result, bench
from jspec.sampling.drafters.config import DraftConfig
from jspec.serve.target import load
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("tiny")))


def test_the_prediction_is_the_sum_of_the_passes():
    always = Result(
        DraftConfig("self:1", 3), plain_passes=100, passes=40, wide=40, row_cost=1.5, draft_cost=0.5
    )
    always.draft_step = 0.1
    assert always.predicted == pytest.approx(100 / (40 * 1.5 + 40 * 0.5))
    seldom = Result(
        DraftConfig("ngram", 3), plain_passes=100, passes=80, wide=10, row_cost=1.5, draft_cost=0.01
    )
    assert seldom.predicted == pytest.approx(100 / (10 * 1.5 + 70 + 80 * 0.01))


def test_counts_are_those_of_the_generations(folder):
    target = load(folder)
    prompts = ["the cat, the cat", "abc"]
    settings = [DraftConfig("ngram", 2), DraftConfig("self:1", 2)]
    results = bench(target, settings, prompts, max_new_tokens=12, repeats=2)
    plain, ngram, own = [result.to_dict() for result in results]
    assert [r.setting.draft for r in results] == ["none", "ngram", "self:1"]
    assert plain["accept_length_bonus_counted"] == 1.0 and plain["acceptance_per_position"] == []
    assert {r.tokens for r in results} == {results[0].tokens} and len(results[1].ratios) == 4
    assert own["passes_with_a_proposal"] <= own["target_passes"] <= plain["target_passes"]
    assert ngram["target_passes"] >= ngram["passes_with_a_proposal"]
    for row in (ngram, own):
        assert row["loop_efficiency"] == pytest.approx(row["ratio_to_plain"] / row["predicted_speed_up"])
        assert row["accept_length_bonus_counted"] >= 1.0
    assert own["draft_step_over_target_step"] > 0 and ngram["draft_step_over_target_step"] is None


def test_the_command_writes_table_json_and_plot(jspec, folder, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n{"turns": ["the cat"]}\n')
    files = ("--json", tmp_path / "r.json", "--plot", tmp_path / "r.png")
    options = ("--target", folder, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 8, "--repeats", 1)
    code, out, _ = jspec("bench", *options, "--num-speculative-tokens", "1,2", "--batch", 2, *files)
    report = json.loads((tmp_path / "r.json").read_text())
    assert code == 0 and "ngram K=1" in out and "ngram K=2" in out
    assert [row["name"] for row in report["results"]] == ["none", "ngram K=1", "ngram K=2"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--num-speculative-tokens", "2,x"], 2, "write whole numbers with commas"),
        (["--repeats", "0"], 1, "repeats = 0 should be a whole number of at least 1"),
        (["--draft", "magic"], 1, "unknown draft 'magic'"),
        (["--json", "no/such/folder/r.json"], 1, "cannot write no/such/folder/r.json"),
        (["--prompts", "none.jsonl"], 1, "cannot read the prompt file none.jsonl"),
    ],
)
def test_mistakes_are_one_line(jspec, folder, tmp_path, arguments, code, message):
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n')
    prompts = [] if "--prompts" in arguments else ["--prompts", tmp_path / "p.jsonl"]
    base = ["--target", folder, "--max-new-tokens", 4, "--repeats", 1, *prompts]
    got, _, err = jspec("bench", *base, *arguments)
    assert got == code and message in err and "Traceback" not in err
