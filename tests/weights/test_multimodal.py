"""Multimodal folders: their text part is the plain model that it is."""

from __future__ import annotations

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec import tree
from jspec.errors import JspecError
from jspec.models import FAMILIES
from jspec.text.tokenizer import stop_token_ids
from jspec.weights import multimodal
from jspec.weights.convert import convert
from jspec.weights.load import load_checkpoint
from tests.models import faults
from tests.models.test_golden import GOLDEN, assert_close, run

# Names of the text part: in files of transformers 4 and 5, in files of its releases between, in Idefics'.
FORMS = {
    "outside": ("language_model.model.", "language_model.lm_head.", ""),
    "inside": ("model.language_model.", "lm_head.", "model."),
    "idefics": ("model.text_model.", "lm_head.", "model."),
}
CASES = [
    ("gemma3", "gemma3_caps", "outside"),
    ("gemma3", "gemma3_ropes", "inside"),
    ("mistral3", "mistral", "outside"),
    ("llava", "gqa_untied", "outside"),
    ("llava", "qwen2", "inside"),
    ("llava_onevision", "tied", "outside"),
    ("smolvlm", "biases", "idefics"),
]


def write(folder, kind, case, form="outside", **changes):
    """A multimodal model whose text part is a golden one; class defaults are left out, as in files."""
    folder.mkdir()
    model, head, others = FORMS[form]
    state = {}
    for name, tensor in load_file(GOLDEN / case / "model.safetensors").items():
        state[name.replace("model.", model, 1) if name.startswith("model.") else head + name[8:]] = tensor
    state[f"{others}vision_tower.vision_model.embeddings.patch.weight"] = np.ones((3, 4), np.int8)
    state[f"{others}multi_modal_projector.linear_1.weight"] = np.ones((3, 4), ml_dtypes.bfloat16)
    state[f"{others}image_newline"] = np.ones(4, np.float32)
    text = json.loads((GOLDEN / case / "config.json").read_text())
    defaults = FAMILIES[text["model_type"]].DEFAULTS
    text = {key: value for key, value in text.items() if defaults.get(key) != value}
    config = dict(
        model_type=kind,
        architectures=["Multimodal"],
        text_config=text,
        vision_config=dict(hidden_size=1152, quantization_config={"bits": 4}),
        mm_tokens_per_image=256,
        image_token_index=262144,
        vocab_size=99,
        torch_dtype="float32",
        eos_token_id=[1, 106],
    )
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(state, folder / "model.safetensors")
    shutil.copy(GOLDEN / case / "golden.npz", folder)
    return folder


@pytest.mark.parametrize(("kind", "case", "form"), CASES)
def test_the_text_part_is_the_plain_model(kind, case, form, tmp_path):
    folder = write(tmp_path / "m", kind, case, form)
    with warnings.catch_warnings(record=True) as warned:  # the golden's own warn too
        warnings.simplefilter("always")
        loaded, plain = load_checkpoint(folder), load_checkpoint(GOLDEN / case)
    assert loaded.config == plain.config and loaded.family is plain.family
    assert not any("vision" in str(one.message) for one in warned)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, plain.params)
    golden, logits, _ = run(folder)
    assert_close(logits, golden["logits"])


@pytest.mark.parametrize("to", ["hf", "orbax"])
@pytest.mark.parametrize(("kind", "case", "form"), CASES[:1] + CASES[3:4])
def test_convert_writes_a_plain_folder(kind, case, form, to, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    source = write(tmp_path / "m", kind, case, form)
    convert(source, tmp_path / "new", to)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert not {key for key in config if "vision" in key or key == "text_config"}
    assert config["model_type"] in FAMILIES and config["architectures"] != ["Multimodal"]
    assert config["eos_token_id"] == [1, 106] and config["dtype"] == "float32"
    ours, theirs = load_checkpoint(tmp_path / "new"), load_checkpoint(source)
    assert ours.config == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    if to == "hf":
        plain = load_file(GOLDEN / case / "model.safetensors")
        assert load_file(tmp_path / "new" / "model.safetensors").keys() == plain.keys()


def test_gemma_3_4b_as_it_is_published():
    """Only what differs from the class's defaults stands in the file."""
    text = dict(
        hidden_size=2560,
        intermediate_size=10240,
        model_type="gemma3_text",
        num_hidden_layers=34,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    )
    published = dict(
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
        boi_token_index=255999,
        eoi_token_index=256000,
        eos_token_id=[1, 106],
        image_token_index=262144,
        initializer_range=0.02,
        mm_tokens_per_image=256,
        text_config=text,
        torch_dtype="bfloat16",
        transformers_version="4.50.0.dev0",
        vision_config=dict(hidden_size=1152, model_type="siglip_vision_model"),
    )
    config = multimodal.text_config(published, has_head=False)
    gemma = FAMILIES[config["model_type"]].from_hf(config, multimodal.PLACE)
    assert (gemma.vocab_size, gemma.heads, gemma.kv_heads, gemma.head_dim) == (262208, 8, 4, 256)
    assert gemma.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4 and gemma.tied
    assert (gemma.rope.kind, gemma.rope.factor, gemma.rope.theta) == ("linear", 8.0, 1e6)
    assert gemma.window_rope.theta == 1e4 and gemma.scale == 1 / 16 and gemma.context_length == 131072


def test_llava_15_as_it_is_published():
    text = dict(
        _name_or_path="lmsys/vicuna-7b-v1.5",
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=4096,
        model_type="llama",
        rms_norm_eps=1e-05,
        torch_dtype="float16",
        vocab_size=32064,
    )
    published = dict(
        model_type="llava", text_config=text, vision_config={}, ignore_index=-100, pad_token_id=32001
    )
    config = multimodal.text_config(published, has_head=True)
    llama = FAMILIES[config["model_type"]].from_hf(config, multimodal.PLACE)
    assert (llama.vocab_size, llama.hidden_size, llama.heads, llama.kv_heads) == (32064, 4096, 32, 32)
    assert llama.context_length == 4096 and not llama.tied


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    theirs, family = transformers.CONFIG_MAPPING[kind](), FAMILIES[kind]
    for key, value in family.DEFAULTS.items():
        assert getattr(theirs, key) == value, key
    if kind in multimodal.ARCHITECTURES:
        assert hasattr(transformers, multimodal.ARCHITECTURES[kind])
    # A file that says nothing is what transformers makes of nothing.
    assert family.from_hf({**family.DEFAULTS}).kv_heads == theirs.num_key_value_heads


@pytest.mark.parametrize(
    ("outer", "inner", "has_head", "tied"),
    [
        (None, None, True, False),  # Mistral Small 3.1, whose class's default would be true
        (None, None, False, True),
        (None, False, False, False),  # the head is missing then, and that is said
        (True, None, False, True),
        (True, False, False, True),  # saved by transformers 5
        (True, False, True, False),
        (None, None, None, False),
    ],
)
def test_whether_the_embedding_is_the_head(outer, inner, has_head, tied):
    said = {
        key: {"tie_word_embeddings": flag} if flag is not None else {}
        for key, flag in ((0, outer), (1, inner))
    }
    config = dict(model_type="mistral3", text_config={"head_dim": 128} | said[1]) | said[0]
    assert multimodal.text_config(config, has_head)["tie_word_embeddings"] is tied


def test_stop_ids_may_stand_in_the_text_part(tmp_path):
    class Tokenizer:
        eos_token_id = None

    (tmp_path / "config.json").write_text(json.dumps(dict(text_config=dict(eos_token_id=7))))
    assert stop_token_ids(tmp_path, Tokenizer) == (7,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(text_config=None), "text_config = null should be an object"),
        (dict(text_config="llama"), 'text_config = "llama" should be an object'),
        (dict(text_config=dict(model_type="phi3")), 'text_config.model_type = "phi3" is not supported'),
        (dict(text_config=dict(hidden_size="two")), 'text_config.hidden_size = "two" should be a pos'),
        (
            dict(text_config=dict(rope_scaling=dict(rope_type="linear"))),
            "no 'text_config.rope_scaling.factor'",
        ),
        (dict(quantization_config={"bits": 4}), "quantization_config = .* changes the maths"),
        (dict(compression_config={"bits": 4}), "compression_config = .* changes the maths"),
        (dict(model_type="qwen2_vl"), r'model_type "qwen2_vl" is not supported: .*\(mrope\)'),
        (dict(model_type="paligemma"), 'model_type "paligemma" is not .* the text part of gemma3, idefics3'),
    ],
)
def test_what_is_refused(changes, message, tmp_path):
    folder = write(tmp_path / "m", "llava", "gqa_untied", **changes)
    with pytest.raises(JspecError, match=message):
        load_checkpoint(folder)


def test_tensors_that_are_no_text_and_none_that_is_known(tmp_path):
    folder = write(tmp_path / "m", "llava", "gqa_untied")
    state = load_file(folder / "model.safetensors")
    del state["language_model.model.norm.weight"]
    state["model.language_model.embed_tokens.weight"] = state["language_model.model.embed_tokens.weight"]
    save_file(state | {"cross_attention.weight": np.ones(3)}, folder / "model.safetensors")
    with pytest.raises(JspecError) as caught:
        load_checkpoint(folder)
    for part in (
        "missing tensors: model.norm.weight",
        "unknown tensors: cross_attention.weight",
        "tensors in more than one file: model.embed_tokens.weight",
    ):
        assert part in str(caught.value)


def test_every_field_of_the_text_part(monkeypatch):
    text = json.loads((GOLDEN / "gemma3_ropes" / "config.json").read_text())

    def read(config):
        plain = multimodal.text_config({**config, "model_type": "gemma3"}, has_head=False)
        return FAMILIES[plain["model_type"]].from_hf(plain, multimodal.PLACE)

    assert faults.check(monkeypatch, read, dict(text_config=text, vision_config={})) > 20


SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
CLIP = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
CLIP |= dict(image_size=28, patch_size=14, projection_dim=16)


@pytest.mark.live
@pytest.mark.parametrize("kind", multimodal.TEXT_PARTS)
def test_live_the_text_part_is_what_transformers_runs(kind, tmp_path):
    import torch
    import transformers

    text = multimodal.TEXT_PARTS[kind]
    seen = {"vipllava": dict(vision_feature_layers=[-1, -2])}.get(kind, {})
    defaults = transformers.CONFIG_MAPPING[kind]().vision_config
    settings = dict(
        text_config=SIZES | {"model_type": text}, vision_config=CLIP | {"model_type": defaults.model_type}
    )
    config = transformers.CONFIG_MAPPING[kind](**settings, **seen)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    centre = 0 if kind.startswith("gemma") else 1
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn_like(value)
            value.copy_(centre + 0.3 * noise if "norm" in key else 0.2 * noise)
        tokens = torch.randint(0, 60, (2, 24))
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.numpy()
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    ours = loaded.family.make(loaded.config)
    chain = tree.chain(*tokens.shape)
    hidden, _, _ = ours.forward(loaded.params, ours.init_cache(2, 32), jnp.array(tokens.numpy()), chain)
    assert_close(np.asarray(ours.unembed(loaded.params, hidden)), logits)
