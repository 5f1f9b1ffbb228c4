"""The command: text on stdout, truth on stderr, one line and a code for every mistake."""

import json
import sys

import pytest

from jspec import cli, generation
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def jspec(monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""

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


def test_generate_streams_the_text_and_then_the_truth(jspec, folder):
    code, out, err = jspec("generate", "--target", folder, "--prompt", "the cat, the", "--max-new-tokens", 24)
    expected = generation.generate("the cat, the", target=folder, max_new_tokens=24)
    assert code == 0 and out == expected.text + "\n"
    line = err.splitlines()[0]
    assert line.startswith(f"24 tokens in {expected.metrics.num_target_passes} target passes | accept length")
    for part in (
        "(bonus counted)",
        "acceptance",
        "by position",
        "tokens/s",
        "draft",
        "verify",
        "rest",
        "prefill",
    ):
        assert part in line
    low = expected.metrics.acceptance_rate < 0.5
    assert ("--draft none" in err) == low


def test_generate_as_json_is_one_object(jspec, folder, tmp_path):
    (tmp_path / "prompt.txt").write_text("the cat, the", encoding="utf-8")
    options = ("--target", folder, "--max-new-tokens", 24, "--json", "--draft", "none")
    code, out, err = jspec("generate", "--prompt-file", tmp_path / "prompt.txt", *options)
    answer = json.loads(out)
    assert code == 0 and err == "" and set(answer) == {"text", "tokens", "finish_reason", "metrics"}
    assert len(answer["tokens"]) == 24 and answer["finish_reason"] == "length"
    assert answer["metrics"]["accept_length"] == 1.0
    assert set(answer["metrics"]["seconds"]) == {"compile", "prefill", "decode", "draft", "verify", "rest"}


def test_stop_strings_and_raw_reach_the_loop(jspec, folder):
    free = generation.generate("abc", target=folder, max_new_tokens=24, raw=True).text
    options = ("--target", folder, "--raw", "--max-new-tokens", 24, "--stop", free[7:10], "--stop", "never")
    code, out, _ = jspec("generate", "--prompt", "abc", *options)
    assert code == 0 and out == free.split(free[7:10])[0] + "\n"


def test_demo_shows_both_and_compares(jspec, tmp_path):
    code, out, _ = jspec("demo", "--target", tiny.folder(tmp_path, context=700), "--max-new-tokens", 8)
    assert code == 0 and out.count("the same text") == 3 and out.count("n-gram:") == 3
    assert "DIFFERENT" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt", ""], 1, "the prompt is empty"),
        ([], 2, "give either --prompt or --prompt-file"),
        (["--prompt", "a", "--prompt-file", "b"], 2, "give either --prompt or --prompt-file"),
        (["--prompt", "a" * 100], 1, "has 100 tokens; the target's context holds 96"),
        (["--prompt", "a", "--max-new-tokens", "-5"], 1, "max_new_tokens = -5 should be"),
        (["--prompt", "a", "--draft", "magic"], 1, "unknown draft 'magic'"),
        (["--prompt", "a", "--dtype", "float8"], 2, "float8"),
        (["--prompt-file", "no/such/file"], 1, "cannot read the prompt file no/such/file"),
        (["--prompt", "a", "--target", "no/such/folder"], 1, "no/such/folder"),
    ],
)
def test_a_mistake_is_one_line(jspec, folder, arguments, code, message):
    target = [] if "--target" in arguments else ["--target", folder]
    got, out, err = jspec("generate", *target, *arguments)
    assert got == code and out == "" and message in err
    assert "Traceback" not in err and (code == 2 or len(err.splitlines()) == 1)


def test_a_prompt_file_that_is_not_utf8(jspec, folder, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    code, _, err = jspec("generate", "--target", folder, "--prompt-file", tmp_path / "bad.txt")
    assert code == 1 and err.strip().endswith("bad.txt is not UTF-8 (byte 3): save it as UTF-8")


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_weight_file(jspec, tmp_path, damage):
    folder = tiny.folder(tmp_path)
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1000])
    code, out, err = jspec("generate", "--target", folder, "--prompt", "a")
    assert code == 1 and out == "" and "model.safetensors" in err and len(err.splitlines()) == 1


def test_an_unsupported_family_names_the_supported(jspec, tmp_path):
    folder = tiny.folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    code, _, err = jspec("generate", "--target", folder, "--prompt", "a")
    assert code == 1 and "mamba" in err and "llama" in err


def test_an_unwritable_cache_folder_is_named(jspec, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file"))
    code, _, err = jspec("generate", "--prompt", "a")
    assert code == 1 and str(tmp_path / "file") in err and "JSPEC_CACHE" in err
