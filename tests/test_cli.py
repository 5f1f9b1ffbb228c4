"""The command: text on stdout, a summary on stderr, one line and a code for every mistake."""

import json

import pytest

from jspec.serve.generate import generate
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("tiny")))


def test_generate_streams_the_text_and_then_the_truth(jspec, folder):
    code, out, err = jspec("generate", "--target", folder, "--prompt", "the cat, the", "--max-new-tokens", 24)
    expected = generate("the cat, the", target=folder, max_new_tokens=24)
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
    free = generate("abc", target=folder, max_new_tokens=24, raw=True).text
    options = ("--target", folder, "--raw", "--max-new-tokens", 24, "--stop", free[7:10], "--stop", "never")
    code, out, _ = jspec("generate", "--prompt", "abc", *options)
    assert code == 0 and out == free.split(free[7:10])[0] + "\n"


def test_sampling_options_reach_the_distribution(jspec, folder):
    """A seed repeats itself, another does not; logprobs; a draft model; a ban that a bias writes."""
    options = ("--target", folder, "--prompt", "abc", "--max-new-tokens", 24, "--json", "--temperature", 1.5)
    texts = []
    for seed, draft in [(1, "ngram"), (1, "self:1"), (2, "ngram")]:
        code, out, _ = jspec("generate", *options, "--seed", seed, "--draft", draft, "--verifier", "coupled")
        assert code == 0
        texts.append(json.loads(out)["tokens"])
    assert texts[0] == texts[1] != texts[2]
    code, out, _ = jspec("generate", *options, "--seed", 1, "--logprobs", "--top-k", 1, "--draft", folder)
    answer = json.loads(out)
    assert answer["metrics"]["acceptance_rate"] == 1.0
    assert answer["logprobs"]["processed"] == [0.0] * 24 and max(answer["logprobs"]["raw"]) < 0
    first = answer["tokens"][0]
    code, out, _ = jspec("generate", *options, "--seed", 1, "--top-k", 1, "--logit-bias", f"{first}:-100")
    assert json.loads(out)["tokens"][0] != first


def test_a_draft_of_another_tokenizer_is_refused(jspec, folder, tmp_path):
    other = tiny.folder(tmp_path)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, out, err = jspec("generate", "--target", folder, "--prompt", "a", "--draft", other)
    assert code == 1 and out == "" and len(err.splitlines()) == 1
    assert "another tokenizer than the target: 2 of 64 ids are other tokens (ids 0, 1)" in err


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
        (["--prompt", "a", "--temperature", "-1"], 1, "temperature is -1.0; it must be finite and 0"),
        (["--prompt", "a", "--top-p", "0"], 1, "top_p is 0.0; it must be more than 0 and at most 1"),
        (["--prompt", "a", "--min-p", "1.5"], 1, "min_p is 1.5; it must be from 0 (off) to 1"),
        (["--prompt", "a", "--top-k", "-2"], 1, "top_k is -2; it must be an integer, 0 (off) or more"),
        (["--prompt", "a", "--logit-bias", "9999:1"], 1, "logit_bias names token 9999"),
        (["--prompt", "a", "--logit-bias", "x"], 2, "write TOKEN_ID:BIAS"),
        (["--prompt", "a", "--verifier", "magic"], 2, "magic"),
        (["--prompt", "a", "--draft", "self:9"], 1, "self:9 should be self:1 to self:1"),
        (["--prompt", "a", "--seed", "-4"], 1, "seed -4 is out of range"),
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
