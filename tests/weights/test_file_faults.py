"""What is wrong with a file is said of that file: git-lfs pointers, faults of config.json; and marks."""

from __future__ import annotations

import codecs
import json

import numpy as np
import pytest

import jspec
from jspec.errors import JspecError
from jspec.files import read_json
from jspec.serve import target
from jspec.text.prompts import read_prompts
from jspec.text.tokenizer import load_tokenizer
from jspec.weights.convert import convert
from jspec.weights.heads import is_head, load_head
from jspec.weights.load import load_checkpoint
from tests import tiny
from tests.weights import head_files, test_gguf
from tests.weights.test_load import halves, make_tensors, write_shards

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 988097824\n"
SAID = "{} is a git-lfs pointer, not the file itself: run git lfs pull"


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers")
    return tiny.folder(tmp_path / "m")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_git_lfs_pointer_is_named_as_such(folder, name):
    (folder / name).write_bytes(POINTER)
    with pytest.raises(JspecError) as caught:
        jspec.load(str(folder))
    assert str(caught.value) == SAID.format(folder / name)


def test_a_git_lfs_pointer_elsewhere(tmp_path):
    shards = write_shards(tmp_path / "shards", halves(make_tensors()))
    gguf = tmp_path / "m.gguf"
    pytest.importorskip("gguf")
    test_gguf.write(gguf, test_gguf.make_tensors())
    head = head_files.write(tmp_path / "head", head_files.BASE, head_files.eagle1(np.random.default_rng(0)))
    prompts = tmp_path / "prompts.jsonl"
    for file, read in [
        (shards / "model-00002-of-00002.safetensors", lambda: load_checkpoint(shards)),
        (shards / "model.safetensors.index.json", lambda: load_checkpoint(shards)),
        (gguf, lambda: load_checkpoint(gguf)),
        (head / "model.safetensors", lambda: load_head(head, head_files.target())),
        (head / "model.safetensors", lambda: is_head(head)),
        (prompts, lambda: read_prompts(prompts)),
    ]:
        file.write_bytes(POINTER)
        with pytest.raises(JspecError) as caught:
            read()
        assert str(caught.value) == SAID.format(file)


def test_a_git_lfs_pointer_in_an_orbax_folder(folder, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    convert(folder, tmp_path / "orbax")
    file = max((tmp_path / "orbax" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    file.write_bytes(POINTER)
    with pytest.raises(JspecError) as caught:
        load_checkpoint(tmp_path / "orbax")
    assert str(caught.value) == SAID.format(file)


def test_a_byte_order_mark_is_read(folder):
    plain = jspec.load(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    for path in folder.glob("*.json"):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("the cat") == plain.tokenizer.encode("the cat")
    assert tokenizer.name_or_path == str(folder)
    target._load.cache_clear()
    marked = jspec.load(str(folder))
    assert marked.checkpoint.config == plain.checkpoint.config
    assert marked.stop_token_ids == (5, tiny.EOS)


def test_a_byte_order_mark_of_an_index(tmp_path):
    folder = write_shards(tmp_path / "m", halves(make_tensors()))
    index = folder / "model.safetensors.index.json"
    index.write_bytes(codecs.BOM_UTF8 + index.read_bytes())
    load_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": ' + "1" * 5000 + "}", "\udcff"])
def test_what_is_no_json(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(JspecError, match=r"config\.json is not JSON: ") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        dict(bos_token_id="<s>"),
        dict(id2label=3),
        dict(torch_dtype="float99"),
        dict(attention_dropout="none"),
        dict(tokenizer_class=None),
        dict(transformers_version="4.41.0"),
    ],
)
def test_what_only_transformers_minds_in_a_config_is_no_fault(folder, changes):
    """Its own reader would refuse some of these, and the error would be one of the tokenizer."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    assert jspec.load(str(folder)).tokenizer.encode("abc") == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size="two"), 'config.json: hidden_size = "two" should be a positive integer'),
        (dict(rope_parameters=[1]), r"config.json: rope_parameters = \[1\] should be an object"),
        (dict(eos_token_id="x"), "config.json: eos_token_id = 'x' should be a token id"),
        (dict(eos_token_id=2**40), "config.json: eos_token_id = 1099511627776 should be a token id"),
        (dict(transformers_version=5), "config.json: transformers_version = 5 is no version"),
        (dict(transformers_version="new"), "config.json: transformers_version = 'new' is no version"),
        (dict(compression_config={"format": "pack"}), "compression_config = .* changes the maths"),
    ],
)
def test_a_fault_of_the_config_is_said_of_the_config(folder, changes, message):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(JspecError, match=message) as caught:
        jspec.load(str(folder))
    assert "tokenizer" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_tokenizer_says_all_of_its_reason(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    with pytest.raises(JspecError, match=r"the tokenizer in .*m cannot be read: \S+") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
