"""Orbax folders: the same arrays come back, and what does not fit or is damaged is named."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec import errors
from jspec.errors import JspecError
from jspec.models import llama
from jspec.weights import orbax
from jspec.weights.load import load_checkpoint
from tests.oracle import random_params
from tests.weights.test_load import CONFIG, make_tensors, write

ocp = pytest.importorskip("orbax.checkpoint")

WEIGHTS = llama.weights(llama.from_hf(CONFIG))
PARAMS = random_params(WEIGHTS)


def assert_same(params, expected=PARAMS, dtype=np.float32):
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.asarray(want).astype(dtype))


def refuse(folder, *parts):
    """Loading fails with one line that names the folder and holds all the parts."""
    with pytest.raises(JspecError) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    for part in (str(folder), *parts):
        assert part in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax") / "deep" / "model"
    orbax.save(folder, CONFIG, PARAMS)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / "model")


def save_tree(folder, tree):
    """What a training loop does: config.json, and Orbax's own command."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", tree)
    return folder


@pytest.mark.parametrize("asked", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype_from_float32(saved, asked):
    loaded = load_checkpoint(saved, asked)
    assert loaded.family is llama and loaded.json == CONFIG and loaded.home == loaded.path == saved
    assert_same(loaded.params, PARAMS, asked)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_every_dtype_is_kept_and_widened(tmp_path, stored):
    params = jax.tree.map(lambda x: x.astype(stored), PARAMS)
    orbax.save(tmp_path / "m", CONFIG, params)
    assert_same(load_checkpoint(tmp_path / "m", None).params, params, stored)
    assert_same(load_checkpoint(tmp_path / "m").params, params)


def test_a_relative_path(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    assert_same(load_checkpoint("model").params)


def test_onto_a_sharding(saved):
    """One for all, or one for each; the arrays keep it."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    each = jax.tree.map(lambda w: jax.NamedSharding(mesh, jax.P(*["x"] * (len(w.shape) == 2))), WEIGHTS)
    for sharding, first in [(one, one), (each, each["embed"])]:
        params = orbax.restore(saved, WEIGHTS, sharding=sharding)
        assert_same(params)
        assert params["embed"].sharding == first
    assert orbax.restore(saved, WEIGHTS)["embed"].sharding == jnp.zeros(1).sharding


def test_a_training_loops_own_checkpoint(tmp_path):
    assert_same(load_checkpoint(save_tree(tmp_path / "m", PARAMS)).params)


def test_safetensors_come_first(folder):
    """A folder that has both is a Hugging Face folder."""
    tensors = make_tensors(seed=3)
    loaded = load_checkpoint(write(folder, tensors))
    np.testing.assert_array_equal(loaded.params["embed"], tensors["model.embed_tokens.weight"])


def test_save_refuses_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("")
    with pytest.raises(JspecError, match="taken already exists and is not empty"):
        orbax.save(tmp_path / "taken", CONFIG, PARAMS)
    with pytest.raises(JspecError, match=r"cannot write .*params"):
        orbax.save(tmp_path / "m", CONFIG, {"embed": object()})

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ocp.Checkpointer, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        orbax.save(tmp_path / "m", CONFIG, PARAMS)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_all_problems_in_one_error(tmp_path):
    tree = {**PARAMS, "extra": jnp.zeros(3), "step": 7}
    del tree["head"]
    first, second = tree["layers"]
    tree["layers"] = [first | {"up": jnp.zeros((3, 4))}, second | {"up": jnp.zeros((16, 24), jnp.int8)}]
    refuse(
        save_tree(tmp_path / "m", tree),
        "does not hold the model that its config describes",
        "missing arrays: head;",
        "unknown arrays: extra, step;",
        "misshapen arrays: layers/0/up is [3, 4], not [16, 24]",
        "arrays of an unsupported dtype: layers/1/up is int8",
    )


def test_another_structure_of_the_same_names(tmp_path):
    tree = {**PARAMS, "layers": dict(zip("01", PARAMS["layers"], strict=True))}
    refuse(save_tree(tmp_path / "m", tree), "corrupt or no Orbax checkpoint", "tree structures do not match")


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_every_damaged_file_is_named(folder, damage):
    for path in sorted((folder / "params").rglob("*")):
        if path.is_dir() or not (content := path.read_bytes()):
            continue
        path.unlink() if damage == "gone" else path.write_bytes(content[:-1])
        refuse(folder, "is corrupt or cut short: " + path.relative_to(folder / "params").as_posix())
        path.write_bytes(content)
    assert_same(load_checkpoint(folder).params)


@pytest.mark.parametrize("text", ["", "{", None])
def test_damage_that_only_orbax_sees(folder, text):
    (folder / "params.json").unlink()
    metadata = folder / "params" / "_METADATA"
    metadata.unlink() if text is None else metadata.write_text(text)
    if text is None:
        (folder / "params" / "manifest.ocdbt").unlink()
    refuse(folder, "params is corrupt or no Orbax checkpoint")


def test_an_empty_folder_and_one_that_is_none(folder, tmp_path):
    shutil.rmtree(folder / "params")
    refuse(folder, "has neither model.safetensors nor")
    (folder / "params").mkdir()
    (folder / "params.json").unlink()
    refuse(folder, "params is corrupt or no Orbax checkpoint")


def test_without_orbax_the_command_is_named(saved, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError("No module named 'orbax'", name="orbax")

    monkeypatch.setattr(errors.importlib, "import_module", absent)
    with pytest.raises(
        JspecError, match=r"'orbax.checkpoint' is not installed: pip install 'jspec\[orbax\]'"
    ):
        load_checkpoint(saved)


def test_a_broken_orbax_is_not_hidden(saved, monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'tensorstore'", name="tensorstore")

    monkeypatch.setattr(errors.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="tensorstore"):
        load_checkpoint(saved)
