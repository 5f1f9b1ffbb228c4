"""`jspec convert`: the same model in another form, whole or not at all."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.sampling.drafters.config import DraftConfig
from jspec.serve.draft import load_draft
from jspec.serve.target import load
from jspec.weights import smollm2
from jspec.weights.convert import FORMS, convert
from jspec.weights.load import load_checkpoint
from tests import tiny
from tests.weights import test_gguf
from tests.weights.test_load import CONFIG, make_tensors, write

pytest.importorskip("orbax.checkpoint")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("tiny"))


def assert_same_params(one, other):
    ours, theirs = load_checkpoint(one, None).params, load_checkpoint(other, None).params
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_an_orbax_folder_serves_as_target_and_draft(jspec, folder, tmp_path):
    code, out, err = jspec("convert", folder, tmp_path / "orbax")
    assert code == 0 and err == ""
    assert out.startswith(f"{tmp_path / 'orbax'}: orbax, float32, ") and " parameters, 0.1 MB; tok" in out
    assert "tokenizer.json" in out
    assert_same_params(folder, tmp_path / "orbax")
    options = ("--prompt", "the cat, the", "--max-new-tokens", 12, "--json", "--draft", "none")
    code, out, err = jspec("generate", "--target", tmp_path / "orbax", *options)
    assert code == 0 and len(json.loads(out)["tokens"]) == 12, err
    target = load(str(tmp_path / "orbax"), "float32")
    assert target.stop_token_ids == (tiny.EOS,)
    params = load_draft(target, DraftConfig(str(tmp_path / "orbax"), 2)).params
    assert params is target.params


def test_there_and_back(folder, tmp_path):
    convert(folder, tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b", to="hf")
    assert_same_params(folder, tmp_path / "b")
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config | {"dtype": "float32"}
    files = [path for path in (tmp_path / "b").iterdir()]
    assert done.size == sum(path.stat().st_size for path in files)
    assert set(done.copied) == {p.name for p in files} - {"config.json", "model.safetensors"}
    assert all((tmp_path / "b" / n).read_bytes() == (folder / n).read_bytes() for n in done.copied)
    assert done.parameters == sum(x.size for x in jax.tree.leaves(load_checkpoint(folder).params))


@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize(
    ("stored", "asked", "result"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("float32", "auto", "float32"),
        ("mixed", "auto", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(tmp_path, to, stored, asked, result):
    tensors = make_tensors(dtype=ml_dtypes.bfloat16 if stored == "mixed" else np.dtype(stored))
    if stored == "mixed":
        tensors["model.norm.weight"] = np.full(16, 1 / 3, np.float32)
    write(tmp_path / "m", tensors, CONFIG | {"torch_dtype": "bfloat16"})
    done = convert(tmp_path / "m", tmp_path / "new", to, asked)
    loaded = load_checkpoint(tmp_path / "new", None)
    assert done.dtype == loaded.json["dtype"] == result and "torch_dtype" not in loaded.json
    assert {x.dtype.name for x in jax.tree.leaves(loaded.params)} == {result}
    np.testing.assert_array_equal(
        np.asarray(loaded.params["embed"], np.float32),
        tensors["model.embed_tokens.weight"].astype(result).astype(np.float32),
    )
    assert done.copied == ()


@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize(("kind", "result"), [("F32", "float32"), ("Q8_0", "float32")])
def test_a_gguf_file_becomes_a_folder_with_its_config(tmp_path, folder, to, kind, result):
    test_gguf.write(tmp_path / "m.gguf", test_gguf.make_tensors(), kind)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    done = convert(tmp_path / "m.gguf", tmp_path / "new", to)
    assert done.dtype == result and done.copied == ("tokenizer.json",)
    assert_same_params(tmp_path / "m.gguf", tmp_path / "new")
    old, new = load_checkpoint(tmp_path / "m.gguf"), load_checkpoint(tmp_path / "new")
    assert new.config == old.config and new.json == {**old.json, "dtype": result}
    assert new.json["eos_token_id"] == 2


def test_smollm2_is_a_name(jspec, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "ensure", lambda: folder)
    code, _, err = jspec("convert", "smollm2", tmp_path / "new", "--to", "hf", "--dtype", "bfloat16")
    assert code == 0, err
    assert load_checkpoint(tmp_path / "new", None).params["embed"].dtype == "bfloat16"


def damaged(folder, tmp_path):
    bad = shutil.copytree(folder, tmp_path / "bad")
    weights = bad / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return bad


@pytest.mark.parametrize("to", FORMS)
def test_a_mistake_is_one_line_and_leaves_nothing(jspec, folder, tmp_path, to, monkeypatch):
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "x").write_text("")
    file.write_text("")
    bad, new = damaged(folder, tmp_path), tmp_path / "new"
    for source, dest, message in [
        (tmp_path / "none", new, f"{tmp_path / 'none'} does not exist"),
        (bad, new, "model.safetensors is corrupt or cut short"),
        (bad, taken, "taken already exists and is not empty"),  # found before the source is read
        (folder, folder, "already exists and is not empty"),
        (folder, file / "new", f"cannot write {file / 'new'}"),
        (folder, file, f"cannot write {file}"),
    ]:
        code, out, err = jspec("convert", source, dest, "--to", to)
        assert code == 1 and out == "" and message in err and len(err.splitlines()) == 1, err

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    code, _, err = jspec("convert", folder, new, "--to", to)
    assert code == 1 and f"cannot write {new}: [Errno 28] No space left" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "file", "taken"]
    assert [p.name for p in taken.iterdir()] == ["x"]


def test_what_is_no_form_and_no_dtype(jspec, folder, tmp_path):
    with pytest.raises(JspecError, match="cannot convert to 'onnx': choose one of orbax, hf"):
        convert(folder, tmp_path / "new", to="onnx")
    with pytest.raises(JspecError, match="cannot load weights as float8: choose one of float32"):
        convert(folder, tmp_path / "new", dtype="float8")
    code, _, err = jspec("convert", folder, tmp_path / "new", "--to", "onnx")
    assert code == 2 and "onnx" in err and not (tmp_path / "new").exists()
