"""Loading and saving Hugging Face folders: what is read, what it costs, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import JspecError
from jspec.models import llama
from jspec.weights import base, huggingface
from jspec.weights.huggingface import save_params
from jspec.weights.load import load_checkpoint

CONFIG = dict(
    model_type="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def file_shapes(config):
    weights = jax.tree.leaves(llama.weights(llama.from_hf(config)))
    return {w.source: w.shape[::-1] if w.transpose else w.shape for w in weights}


def make_tensors(config=CONFIG, dtype=np.float32, seed=0):
    """Random tensors under the file's names and in the file's shapes."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in file_shapes(config).items()}


def write(folder, tensors, config=CONFIG):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, shards, config=CONFIG):
    """Write one file for each dict of tensors, and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for index, tensors in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def halves(tensors):
    names = list(tensors)
    half = len(names) // 2
    return {n: tensors[n] for n in names[:half]}, {n: tensors[n] for n in names[half:]}


def assert_loaded(loaded, tensors, dtype):
    weights = jax.tree.leaves(loaded.family.weights(loaded.config))
    params = jax.tree.leaves(loaded.params)
    assert {w.source for w in weights} == set(tensors)
    for weight, param in zip(weights, params, strict=True):
        expected = tensors[weight.source].astype(dtype)
        assert param.shape == weight.shape and param.dtype == dtype, weight.source
        np.testing.assert_array_equal(param, expected.T if weight.transpose else expected)


def refuse(path, *parts, dtype=jnp.float32):
    """Loading fails with one line that holds all the parts."""
    with pytest.raises(JspecError) as caught:
        load_checkpoint(path, dtype)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("asked", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype(tmp_path, stored, asked):
    tensors = make_tensors(dtype=stored)
    loaded = load_checkpoint(write(tmp_path / "m", tensors), asked)
    assert loaded.family is llama and loaded.path == tmp_path / "m"
    assert_loaded(loaded, tensors, asked)


def test_blocks_of_rows_join(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", 7)
    tensors = make_tensors()
    assert_loaded(load_checkpoint(write(tmp_path / "m", tensors)), tensors, np.float32)


def test_params_survive_donation_and_the_file(tmp_path):
    """The arrays share no memory with the file, and donating one is allowed."""
    tensors = make_tensors()
    loaded = load_checkpoint(write(tmp_path / "m", tensors))
    save_file({n: np.zeros_like(t) for n, t in tensors.items()}, tmp_path / "m" / "model.safetensors")
    assert_loaded(loaded, tensors, np.float32)
    plus = jax.jit(lambda x: x + 1, donate_argnums=0)(loaded.params["norm"])
    np.testing.assert_array_equal(plus, tensors["model.norm.weight"] + 1)


def test_shards(tmp_path):
    tensors = make_tensors()
    loaded = load_checkpoint(str(write_shards(tmp_path / "m", halves(tensors))))
    assert_loaded(loaded, tensors, np.float32)


def test_tied_file_may_hold_a_head_and_constants(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = make_tensors(config)
    spare = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    loaded = load_checkpoint(write(tmp_path / "m", tensors | spare, config))
    assert "head" not in loaded.params
    assert_loaded(loaded, tensors, np.float32)


def test_save_then_load(tmp_path):
    tensors = make_tensors()
    loaded = load_checkpoint(write(tmp_path / "m", tensors))
    copy = tmp_path / "new" / "copy"
    save_params(copy, CONFIG, loaded.params, llama.weights(loaded.config))
    saved = load_file(copy / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(np.array_equal(saved[n], tensors[n]) for n in tensors)
    assert json.loads((copy / "config.json").read_text()) == CONFIG
    assert_loaded(load_checkpoint(copy), tensors, np.float32)


def test_save_refuses_and_leaves_nothing(tmp_path, monkeypatch):
    loaded = load_checkpoint(write(tmp_path / "m", make_tensors()))
    weights = llama.weights(loaded.config)
    with pytest.raises(JspecError, match="m already exists and is not empty"):
        save_params(tmp_path / "m", CONFIG, loaded.params, weights)
    (tmp_path / "file").write_text("")
    with pytest.raises(JspecError, match=r"cannot write .*file/copy"):
        save_params(tmp_path / "file" / "copy", CONFIG, loaded.params, weights)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_params(tmp_path / "copy", CONFIG, loaded.params, weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m"]


def test_all_problems_in_one_error(tmp_path):
    tensors = make_tensors()
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((24, 16), np.int8)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    first, second = halves(tensors)
    twice = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    refuse(
        write_shards(tmp_path / "m", (first | twice, second | twice)),
        f"{tmp_path / 'm'} does not hold the model",
        "missing tensors: lm_head.weight, model.norm.weight",
        "unknown tensors: model.layers.2.mlp.up_proj.weight",
        "misshapen tensors: model.layers.0.mlp.up_proj.weight is [3, 4], not [24, 16]",
        "tensors of an unsupported dtype: model.layers.1.mlp.up_proj.weight is I8",
        "tensors in more than one file: model.embed_tokens.weight",
    )


def test_long_lists_are_cut(tmp_path):
    tensors = {f"extra.{i:03}": np.zeros(1, np.float32) for i in range(50)}
    refuse(write(tmp_path / "m", make_tensors() | tensors), "extra.019 and 30 more")


def test_untied_file_needs_its_head(tmp_path):
    tensors = make_tensors()
    del tensors["lm_head.weight"]
    refuse(write(tmp_path / "m", tensors), "missing tensors: lm_head.weight")


@pytest.mark.parametrize("keep", [0, 5, 2000, -4])
def test_cut_file(tmp_path, keep):
    path = write(tmp_path / "m", make_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(tmp_path / "m", f"{path} is corrupt or cut short")


def test_cut_shard_is_named(tmp_path):
    folder = write_shards(tmp_path / "m", halves(make_tensors()))
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refuse(folder, f"{path} is corrupt or cut short")


def test_absent_files(tmp_path):
    refuse(tmp_path / "none", f"{tmp_path / 'none'} does not exist")
    folder = write_shards(tmp_path / "m", halves(make_tensors()))
    (folder / "model-00001-of-00002.safetensors").unlink()
    refuse(folder, f"{folder} lacks weight files: model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    refuse(folder, f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refuse(folder, "PyTorch's format (pytorch_model.bin)", "convert them to safetensors")
    (folder / "config.json").unlink()
    refuse(folder, f"{folder} has no config.json")


def test_a_file_that_is_no_gguf(tmp_path):
    path = write(tmp_path / "m", make_tensors()) / "model.safetensors"
    refuse(path, f"{path} is not a .gguf file", "config.json")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_malformed_index(tmp_path, index):
    folder = write_shards(tmp_path / "m", halves(make_tensors()))
    (folder / "model.safetensors.index.json").write_text(index)
    refuse(folder, "model.safetensors.index.json has no 'weight_map'")


def test_index_stays_in_its_folder(tmp_path):
    folder = write_shards(tmp_path / "m", halves(make_tensors()))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    refuse(folder, "names files outside its folder: ../x.safetensors")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"{", ["config.json is not JSON"]),
        (b"\xff\xfe", ["config.json is not JSON"]),
        (b"[1]", ["config.json should hold a JSON object, not list"]),
        (b"{}", ["config.json has no 'model_type'", "supported: gemma3_text, llama"]),
        (
            b'{"model_type": "mamba"}',
            ['model_type "mamba" is not supported', "supported: gemma3_text, llama"],
        ),
        (b'{"model_type": ["llama"]}', ['model_type ["llama"] is not supported']),
        (b'{"model_type": "llama"}', ["hidden_size"]),
    ],
)
def test_malformed_config(tmp_path, text, parts):
    folder = write(tmp_path / "m", make_tensors())
    (folder / "config.json").write_bytes(text)
    refuse(folder, *parts)


def test_dtype_that_is_no_weight_dtype(tmp_path):
    refuse(write(tmp_path / "m", make_tensors()), "cannot load weights as int8", "float32", dtype=jnp.int8)


MEASURE = """
import sys, threading, time
import jax, jax.numpy as jnp
from jspec.weights.load import load_checkpoint

def anonymous():  # bytes; pages of mapped files do not count
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)

jnp.zeros(1).block_until_ready()
peak, done, before = 0, False, anonymous()
thread = threading.Thread(target=watch)
thread.start()
loaded = load_checkpoint(sys.argv[1], jnp.dtype(sys.argv[2]))
done = True
thread.join()
print((peak - before) / sum(x.nbytes for x in jax.tree.leaves(loaded.params)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory(tmp_path, dtype):
    """At most 1.2 times the weights, though the embedding is two thirds of the 200 MB."""
    config = CONFIG | dict(vocab_size=32768, hidden_size=1024, intermediate_size=2048)
    config |= dict(tie_word_embeddings=True, num_attention_heads=8)
    stored = ml_dtypes.bfloat16 if dtype == "float32" else np.float32
    tensors = {name: np.full(shape, 0.5, stored) for name, shape in file_shapes(config).items()}
    folder = write(tmp_path / "m", tensors, config)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), dtype], capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.2
