"""Draft heads that are refused, each with what disagrees; and the files that torch wrote."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.weights.heads import load_head
from jspec.weights.heads.files import conversion
from tests.weights.head_files import (
    BASE,
    GOLDEN,
    ORIGINAL,
    eagle1,
    eagle3,
    medusa,
    nvidia,
    speculators,
    target,
    write,
)

RNG = np.random.default_rng(7)

D2T = np.arange(96) * 2 - np.arange(96)
REFUSED = {
    "another width": (
        BASE | dict(hidden_size=24),
        {},
        "reads features of width 24, and .* has a width of 32",
    ),
    "another vocabulary": (BASE | dict(vocab_size=200), {}, "a target of 200 tokens, and .* has 199"),
    "a deeper target": (BASE | dict(num_target_layers=36), {}, "a target of 36 layers, and .* has 8"),
    "a layer too far": (
        BASE | dict(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        {},
        "reads its target after 9 layers, and .* has 8 layers",
    ),
    "a layer too far in NVIDIA's count": (
        nvidia(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        {},
        "reads its target after 9 layers, and .* has 8 layers",
    ),
    "no list of layers": (
        BASE | dict(eagle_aux_hidden_state_layer_ids="2"),
        {},
        "should be a list of whole numbers",
    ),
    "two feature layers": (
        BASE | dict(eagle_aux_hidden_state_layer_ids=[2, 4]),
        {},
        "fc.weight reads 96 numbers, and 2 feature layers of width 32 give 64",
    ),
    "draft ids out of range": (
        {},
        {"d2t": np.where(np.arange(96) == 95, 104, D2T)},
        "d2t maps draft token 95 to 199, but the target has 199 tokens",
    ),
    "negative draft ids": ({}, {"d2t": D2T - 1}, "d2t maps draft token 0 to -1"),
    "draft ids that fall": (
        {},
        {"d2t": np.where(np.arange(96) == 5, 3, D2T)},
        "d2t maps draft tokens 4 and 5 to 8 and 8, which should increase",
    ),
    "too few draft ids": ({}, {"d2t": D2T[:95]}, r"d2t is I64 \[95\], not one integer for each of 96"),
    "draft ids that are no integers": ({}, {"d2t": D2T / 1}, "d2t is F32"),
    "no draft ids": (
        {},
        {"d2t": None},
        "has no d2t, which says what the 96 draft tokens .* the target's 199",
    ),
    "more draft tokens than tokens": (
        dict(draft_vocab_size=300),
        {},
        "draft_vocab_size 300 is more than .* 199",
    ),
    "another draft vocabulary": (
        dict(draft_vocab_size=95),
        {"d2t": D2T[:95]},
        r"misshapen tensors: lm_head.weight is \[96, 32\], not \[95, 32\]",
    ),
    "tensors of another model": (
        {},
        {"midlayer.hidden_norm.weight": None, "norm.weight": None, "extra": np.ones(3)},
        "missing tensors: midlayer.hidden_norm.weight, norm.weight; unknown tensors: extra",
    ),
    "an embedding it cannot take": (
        dict(hidden_size=24, target_hidden_size=32),
        {},
        "has no embed_tokens.weight, and its stream is of width 24, and .* has a width of 32",
    ),
    "another RoPE": (
        dict(rope_scaling=dict(type="mrope", factor=4.0)),
        {},
        'rope_scaling.type = "mrope" changes the maths',
    ),
    "another activation": (dict(hidden_act="gelu"), {}, 'hidden_act = "gelu" changes the maths'),
    "a window": (
        dict(use_sliding_window=True, sliding_window=8, max_window_layers=0),
        {},
        "use_sliding_window = true changes the maths",
    ),
    "quantised": (dict(quantization_config={"bits": 4}), {}, "quantization_config = .* changes the maths"),
    "both norms": (
        dict(fc_norm=True, norm_before_fc=True),
        {},
        "fc_norm = true changes .* norm_before_fc",
    ),
    "parallel drafting": (nvidia(parallel_draft_step=2), {}, "parallel_draft_step = 2 changes the maths"),
    "wide later layers": (nvidia(next_layer_regular=False), {}, "next_layer_regular = false changes"),
    "no norm of the embedding": (
        nvidia(use_input_layernorm_in_first_layer=False),
        {},
        "in_first_layer = false",
    ),
    "no object": (dict(eagle_config=[1]), {}, r"eagle_config = \[1\] should be an object"),
    "P-EAGLE": (speculators("peagle"), {}, 'speculators_model_type "peagle" is not supported'),
    "no layer": (dict(speculators_model_type="eagle3"), {}, "has no 'transformer_layer_config'"),
    "another layer": (
        speculators("eagle3", BASE | dict(model_type="gpt_oss")),
        {},
        'transformer_layer_config.model_type = "gpt_oss" changes the maths',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused(case, tmp_path):
    changes, tensors, message = REFUSED[case]
    state = {name: value for name, value in (eagle3(RNG) | tensors).items() if value is not None}
    state = state if "d2t" in tensors or "d2t" not in state else state | {"d2t": D2T}
    config = BASE | dict(draft_vocab_size=96) | changes
    with pytest.raises(JspecError, match=message):
        load_head(write(tmp_path / "head", config, state), target())


def test_an_eagle_head_of_another_target_is_refused(tmp_path):
    for changes, message in (
        (dict(hidden_size=24), "reads features of width 24, and .* has a width of 32"),
        (dict(vocab_size=200), "a target of 200 tokens, and .* has 199"),
        (dict(bias=False), "unknown tensors: fc.bias"),
        (
            dict(num_hidden_layers=2),
            "missing tensors: layers.1.input_layernorm.weight, layers.1.mlp.down_proj",
        ),
        (nvidia(use_aux_hidden_state=True) | dict(architectures=None), "use_aux_hidden_state = true changes"),
    ):
        with pytest.raises(JspecError, match=message):
            load_head(write(tmp_path / "head", BASE | changes, eagle1(RNG)), target())


def test_eagle3_needs_a_target_with_enough_layers():
    with pytest.raises(JspecError, match=r"reads layers 2, L/2 and L-3 of its target, and .* L = 2 layers"):
        load_head(GOLDEN / "heads/eagle3/head", target("heads/eagle1/target"))


def test_a_folder_that_is_no_head_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        JspecError,
        match=r"is no draft head: .* its 75 tensors .*0\.0\.linear\.weight .*midlayer\.\*.*fc\.weight",
    ):
        load_head(GOLDEN / "heads/eagle3/target", target())
    with pytest.raises(
        JspecError, match=r"is no draft head: it has none of model.safetensors, medusa_lm_head"
    ):
        load_head(tmp_path, target())
    for path in (tmp_path / "nowhere", GOLDEN / "heads/eagle3/head/config.json"):
        with pytest.raises(JspecError, match="is no folder: give the folder of a draft head"):
            load_head(path, target())
    with pytest.raises(JspecError, match=r"cannot read .*config.json: No such file"):
        load_head(write(tmp_path / "head", None, eagle3(RNG)), target())


@pytest.mark.parametrize("keep", [5, 4000, -1])
def test_a_file_cut_short_is_refused(keep, tmp_path):
    file = write(tmp_path / "head", BASE, eagle1(RNG)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(JspecError, match=r"model.safetensors is corrupt or cut short"):
        load_head(file.parent, target())


# Files that torch wrote. Reading them needs torch, so those tests are live.


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_without_torch_the_command_that_converts_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(
        JspecError, match=r"needs torch: pip install torch, or convert .* python -c .*weights_only"
    ):
        load_head(tmp_path, target())


def write_torch(folder, config, state, name, **options):
    import torch

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    state = {
        key: torch.tensor(value.astype(np.float32) if value.dtype == float else value)
        for key, value in state.items()
    }
    torch.save(state, folder / name, **options)
    return folder, state


@pytest.mark.live
@pytest.mark.parametrize("zipped", [True, False])
def test_live_torchs_files_are_the_safetensors(zipped, tmp_path):
    state, config = eagle3(RNG), BASE | dict(draft_vocab_size=96)
    options = dict(_use_new_zipfile_serialization=zipped)
    folder, _ = write_torch(tmp_path / "torch", config, state, "pytorch_model.bin", **options)
    got = load_head(folder, target())
    wanted = load_head(write(tmp_path / "safetensors", config, state), target())
    assert got.config == wanted.config
    for name in ("fc", "head", "ids"):
        np.testing.assert_array_equal(got.params[name], wanted.params[name])
    # The command that a user without torch is given makes the other folder of this one.
    command = conversion(folder / "pytorch_model.bin")
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    (folder / "pytorch_model.bin").unlink()
    np.testing.assert_array_equal(load_head(folder, target()).params["fc"], wanted.params["fc"])


@pytest.mark.live
def test_live_medusa_and_shards_in_bfloat16(tmp_path):
    import torch

    folder, state = write_torch(tmp_path / "medusa", {}, medusa(RNG, *ORIGINAL), "medusa_lm_head.pt")
    torch.save({name: tensor.bfloat16() for name, tensor in state.items()}, folder / "medusa_lm_head.pt")
    got = load_head(folder, target()).params["blocks"][2][1]["w"]
    np.testing.assert_array_equal(got, state["2.1.linear.weight"].bfloat16().float().numpy().T)
    shards = {"a.bin": sorted(state)[::2], "b.bin": sorted(state)[1::2]}
    where = {name: file for file, names in shards.items() for name in names}
    for file, names in shards.items():
        torch.save({name: state[name] for name in names}, folder / file)
    (folder / "medusa_lm_head.pt").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    got = load_head(folder, target()).params["blocks"][2][1]["w"]
    np.testing.assert_array_equal(got, state["2.1.linear.weight"].numpy().T)


class Bomb:
    def __reduce__(self):
        return print, ("a pickle was executed",)


@pytest.mark.live
def test_live_a_torch_file_that_is_no_table_of_tensors_is_refused(tmp_path, capsys):
    import torch

    folder, state = write_torch(tmp_path / "head", BASE, eagle1(RNG), "pytorch_model.bin")
    file = folder / "pytorch_model.bin"
    whole = file.read_bytes()
    for content in (
        Bomb(),
        [1, 2],
        {"fc.weight": 3},
        {1: torch.ones(2)},
        whole[:500],
        whole[:-40],
        b"",
        b"text",
    ):
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
        with pytest.raises(
            JspecError, match=r"is corrupt, cut short, or holds more|should hold tensors by name"
        ):
            load_head(folder, target())
    assert "executed" not in capsys.readouterr().out
