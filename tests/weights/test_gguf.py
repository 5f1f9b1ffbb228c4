"""GGUF files: the same tensors and config as a Hugging Face folder, or a clear refusal."""

import jax
import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.models import llama
from jspec.models.rope import Rope
from jspec.weights import base
from jspec.weights.gguf import GgufFile
from jspec.weights.load import load_checkpoint

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, WIDTH, CHANNELS, MLP, VOCAB, LAYERS = 4, 2, 64, 16, 96, 48, 2
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": ("input_layernorm", (WIDTH,)),
    "ffn_norm": ("post_attention_layernorm", (WIDTH,)),
    "attn_q": ("self_attn.q_proj", (WIDTH, WIDTH)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * CHANNELS, WIDTH)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * CHANNELS, WIDTH)),
    "attn_output": ("self_attn.o_proj", (WIDTH, WIDTH)),
    "ffn_gate": ("mlp.gate_proj", (MLP, WIDTH)),
    "ffn_up": ("mlp.up_proj", (MLP, WIDTH)),
    "ffn_down": ("mlp.down_proj", (WIDTH, MLP)),
}


def permute(array, heads):
    """What llama.cpp's converter does to the rows of query and key projections."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def make_tensors(tied=False, bias=False):
    """Random tensors as (GGUF name -> (Hugging Face name, array in Hugging Face's order))."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {} if tied else {"output": (VOCAB, WIDTH)}
    tensors = {f"{n}.weight": (f"{TOP[n]}.weight", rng.normal(size=s)) for n, s in shapes.items()}
    for i in range(LAYERS):
        for name, (hf, shape) in PARTS.items():
            kinds = {"weight": shape} | (
                {"bias": shape[:1]} if bias and "attn_" in name and "norm" not in name else {}
            )
            for kind, size in kinds.items():
                tensors[f"blk.{i}.{name}.{kind}"] = (f"model.layers.{i}.{hf}.{kind}", rng.normal(size=size))
    return {name: (hf, array.astype(np.float32)) for name, (hf, array) in tensors.items()}


def write(path, tensors, kind="F32", architecture="llama", extra=None, drop=()):
    """Write a GGUF file; matrices are quantised to ``kind``. Returns the values that it holds."""
    writer, held = gguf.GGUFWriter(path, architecture), {}
    settings = {
        "context_length": 128,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
        "rope.dimension_count": CHANNELS,
        "vocab_size": VOCAB,
    } | (extra or {})
    adders = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
    }
    for key, value in settings.items():
        if key not in drop:
            adders[type(value)](f"{architecture}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, (hf, array) in tensors.items():
        heads = HEADS if ".attn_q." in name else KV_HEADS if ".attn_k." in name else None
        stored = permute(array, heads) if heads and architecture == "llama" else array
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, stored)
            held[hf] = array
        else:
            quantised = getattr(gguf.GGMLQuantizationType, kind)
            data = gguf.quantize(stored, quantised)
            writer.add_tensor(name, data, raw_dtype=quantised)
            # Blocks run along rows, so quantising commutes with the order of rows.
            held[hf] = gguf.dequantize(gguf.quantize(array, quantised), quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def assert_loaded(path, held, dtype=np.float32):
    loaded = load_checkpoint(path, dtype)
    weights = jax.tree.leaves(llama.weights(loaded.config))
    assert {w.source for w in weights} == set(held)
    for weight, param in zip(weights, jax.tree.leaves(loaded.params), strict=True):
        expected = held[weight.source].astype(dtype)
        np.testing.assert_array_equal(param, expected.T if weight.transpose else expected, weight.source)
    return loaded


def refuse(path, *parts):
    with pytest.raises(JspecError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    for part in (str(path), *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_tensors_and_config(tmp_path, kind):
    path = tmp_path / "m.gguf"
    loaded = assert_loaded(path, write(path, make_tensors(), kind))
    assert loaded.path == path
    assert loaded.config == llama.Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=CHANNELS,
        context_length=128,
        norm_eps=1e-5,
        rope=Rope(theta=50000.0),
    )


def test_blocks_of_rows_join(tmp_path, monkeypatch):
    """Rows of a permuted matrix come from anywhere in the file."""
    monkeypatch.setattr(base, "BLOCK", 7)
    path = tmp_path / "m.gguf"
    assert_loaded(path, write(path, make_tensors(), "Q8_0"), jax.numpy.bfloat16)


def test_tied_and_biased(tmp_path):
    path = tmp_path / "m.gguf"
    held = write(path, make_tensors(tied=True, bias=True), drop=("vocab_size",))
    loaded = assert_loaded(path, held)
    assert loaded.config.tied and loaded.config.attention_bias and loaded.config.vocab_size == VOCAB


def test_folder_of_one_file(tmp_path):
    held = write(tmp_path / "m.gguf", make_tensors())
    assert_loaded(tmp_path, held)
    write(tmp_path / "n.gguf", make_tensors())
    refuse(tmp_path, "several .gguf files (m.gguf, n.gguf)")


@pytest.mark.parametrize(
    ("extra", "rope"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, Rope(theta=50000.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, Rope(50000.0, "linear", 4.0)),
        ({"rope.scaling.factor": 4.0}, Rope(50000.0, "linear", 4.0)),
    ],
)
def test_rope_scaling(tmp_path, extra, rope):
    write(tmp_path / "m.gguf", make_tensors(), extra=extra)
    assert llama.from_hf(GgufFile(tmp_path / "m.gguf").config).rope == rope


def test_stop_ids_are_in_the_config(tmp_path):
    write(tmp_path / "m.gguf", make_tensors())
    config = GgufFile(tmp_path / "m.gguf").config
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported"),
        ({"rope.scaling.type": "linear"}, "llama.rope.scaling.factor = None should be a positive number"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count = 8 is not supported"),
        ({"attention.key_length": 16, "attention.value_length": 8}, "llama.attention.value_length = 8"),
        ({"expert_count": 8}, "llama.expert_count = 8 is not known here"),
        ({"logit_scale": 0.5}, "llama.logit_scale = 0.5 is not known here"),
        ({"attention.head_count": 0}, "llama.attention.head_count = 0 should be a positive integer"),
    ],
)
def test_other_maths_is_refused(tmp_path, extra, part):
    write(tmp_path / "m.gguf", make_tensors(), extra=extra)
    refuse(tmp_path / "m.gguf", part)


def test_baked_rope_factors_are_refused(tmp_path):
    factors = {"rope_freqs.weight": ("-", np.ones(CHANNELS // 2, np.float32))}
    write(tmp_path / "m.gguf", make_tensors() | factors)
    refuse(tmp_path / "m.gguf", "rope_freqs.weight", "load the model from its safetensors")


def test_other_architecture(tmp_path):
    write(tmp_path / "m.gguf", make_tensors(), architecture="mamba")
    refuse(tmp_path / "m.gguf", "architecture 'mamba' is not supported (supported: llama, gemma3)")


def make_gemma3_tensors():
    """The same with Gemma 3's norms, which its converter adds 1 to."""
    tensors = make_tensors(tied=True)
    for i in range(LAYERS):
        blk, layer = f"blk.{i}", f"model.layers.{i}"
        before_mlp = f"{layer}.pre_feedforward_layernorm.weight"
        tensors[f"{blk}.ffn_norm.weight"] = (before_mlp, tensors[f"{blk}.ffn_norm.weight"][1])
        for name, hf, size in [
            ("attn_q_norm", "self_attn.q_norm", CHANNELS),
            ("attn_k_norm", "self_attn.k_norm", CHANNELS),
            ("post_attention_norm", "post_attention_layernorm", WIDTH),
            ("post_ffw_norm", "post_feedforward_layernorm", WIDTH),
        ]:
            values = np.linspace(1, 2, size, dtype=np.float32) + i
            tensors[f"{blk}.{name}.weight"] = (f"{layer}.{hf}.weight", values)
    return tensors


def test_gemma3(tmp_path):
    path = tmp_path / "m.gguf"
    extra = {"attention.sliding_window": 7, "attention.key_length": CHANNELS, "rope.scaling.factor": 8.0}
    held = write(path, make_gemma3_tensors(), "Q8_0", "gemma3", extra)
    minus_one = {name: array - 1 if "norm" in name else array for name, array in held.items()}
    config = assert_loaded(path, minus_one).config
    assert config.windows == (7, 7) and config.tied and config.scale == CHANNELS**-0.5
    assert config.rope == Rope(50000.0, "linear", 8.0) and config.window_rope == Rope(10000.0)


def test_gemma3_needs_its_window_and_no_key_that_nobody_knows(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, make_gemma3_tensors(), architecture="gemma3")
    with pytest.raises(JspecError, match="layers of sliding_attention, but no sliding_window"):
        load_checkpoint(path)
    write(path, make_gemma3_tensors(), architecture="gemma3", extra={"attn_logit_softcapping": 50.0})
    refuse(path, "gemma3.attn_logit_softcapping = 50.0 is not known here")


def test_gemma3_27b_scales_its_scores_by_the_heads_share(tmp_path):
    path = tmp_path / "m.gguf"
    extra = {"attention.sliding_window": 7, "attention.key_length": 24, "block_count": 62}
    write(path, make_gemma3_tensors(), architecture="gemma3", extra=extra, drop=("rope.dimension_count",))
    assert GgufFile(path).config["query_pre_attn_scalar"] == WIDTH // HEADS


def test_tensors_that_do_not_fit(tmp_path):
    tensors = make_tensors()
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = (tensors["blk.0.ffn_up.weight"][0], np.ones((4, WIDTH), np.float32))
    tensors["blk.0.attn_q_norm.weight"] = ("-", np.ones(CHANNELS, np.float32))
    tensors["blk.0.ffn_gate.weight"] = ("-", np.ones((MLP, WIDTH), np.int32))
    write(tmp_path / "m.gguf", tensors)
    refuse(
        tmp_path / "m.gguf",
        "missing tensors: model.layers.1.mlp.up_proj.weight",
        "unknown tensors: blk.0.attn_q_norm.weight",
        "misshapen tensors: model.layers.0.mlp.up_proj.weight is [4, 64], not [96, 64]",
        "tensors of an unsupported dtype: model.layers.0.mlp.gate_proj.weight is I32",
    )


@pytest.mark.parametrize("keep", [0, 3, 20, 300, -1000])
def test_cut_file(tmp_path, keep):
    path = tmp_path / "m.gguf"
    write(path, make_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    refuse(path, "is corrupt or not a GGUF file")
