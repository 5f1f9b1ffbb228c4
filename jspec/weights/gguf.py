"""Reading GGUF files of the llama and gemma3 architectures, by the ``gguf`` package.

A GGUF file is read as if it were a Hugging Face folder: its metadata become a
config.json, its tensors get Hugging Face names, and what its converter changed is put
back: for llama the rows of the query and key projections, permuted for interleaved
RoPE; for gemma3 the norm weights, to which 1 was added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import JspecError, optional
from jspec.files import refuse_pointer
from jspec.weights.base import Tensor

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# config.json's keys and GGUF's, the latter without the architecture's name before them
CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
# Keys that are checked, or that say nothing about the maths.
CHECKED = ("attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor")
HARMLESS = ("rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout")
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture differ: names and keys beside the common ones, and their values.

    ``fixed``: what config.json has to say although the file does not.
    """

    fixed: Mapping[str, Any]
    in_layer: Mapping[str, str]
    config: Mapping[str, str]
    permuted: bool = False  # the rows of q and k
    norms_plus_one: bool = False


ARCHITECTURES = {
    "llama": Architecture(
        fixed={"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
        in_layer={},
        config={},
        permuted=True,
    ),
    # llama.cpp has the pattern and the local base as constants; newer files may name them.
    "gemma3": Architecture(
        fixed={
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": None,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        },
        in_layer={
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config={
            "sliding_window": "attention.sliding_window",
            "rope_local_base_freq": "rope.freq_base_swa",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norms_plus_one=True,
    ),
}
GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose scores are not scaled by its heads' width, which the file does not say."""


class GgufFile:
    """The tensors of a GGUF file under Hugging Face names, and its config.json.

    Raises `JspecError` for a file that is corrupt, of another architecture, or that asks
    for maths which a config.json of its family cannot express.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.twice: list[str] = []  # the reader refuses a name held twice
        self._gguf = optional("gguf")
        refuse_pointer(self.path)
        try:
            reader = self._gguf.GGUFReader(self.path)
            # Values only: the reader's own form takes 150 MB for a vocabulary.
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # a corrupt file makes the reader fail in any of numpy's ways
            raise JspecError(f"{path} is corrupt or not a GGUF file: {error}") from error
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise JspecError(
                f"{path}: architecture {self.architecture!r} is not supported (supported: {known})"
            )
        self._kind = ARCHITECTURES[self.architecture]
        names = {**IN_LAYER, **self._kind.in_layer}
        self._raw = {_hf_name(tensor.name, names): tensor for tensor in reader.tensors}
        self.tensors = {name: self._describe(tensor) for name, tensor in self._raw.items()}
        self.config = _config(self)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of a tensor, de-quantised."""
        tensor = self._raw[name]
        rows: slice | np.ndarray = slice(start, stop)
        if (heads := self._permuted_heads(name)) is not None:
            count = self.tensors[name].shape[0]
            rows = np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).ravel()[start:stop]
        if len(tensor.shape) == 1:  # its blocks do not end where rows do
            vector = self._gguf.dequantize(tensor.data, tensor.tensor_type)[rows]
            return vector - 1 if self._kind.norms_plus_one and name.endswith("norm.weight") else vector
        return self._gguf.dequantize(tensor.data[rows], tensor.tensor_type)

    def _permuted_heads(self, name: str) -> int | None:
        if not self._kind.permuted:
            return None
        if ".q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".k_proj." in name else None

    def _describe(self, tensor: Any) -> Tensor:
        try:
            _, block_bytes = self._gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            self._gguf.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.tensor_type)
            readable = True
        except NotImplementedError:
            readable = False
        return Tensor(tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type.name, readable)


def _hf_name(name: str, in_layer: Mapping[str, str]) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown names stay."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    blk, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if blk == "blk" and index.isdecimal() and part in in_layer:
        return f"model.layers.{index}.{in_layer[part]}.{kind}"
    return name


def _config(file: GgufFile) -> dict[str, Any]:
    """The config.json that describes the same model."""
    own = _own(file)
    _refuse(file, own)
    kind = ARCHITECTURES[file.architecture]
    config: dict[str, Any] = dict(kind.fixed)
    for key, name in {**CONFIG, **kind.config}.items():
        if (value := own.get(name)) is not None:
            # The shortest decimal of a float32: 1e-05 for 9.999999747378752e-06
            config[key] = float(str(np.float32(value))) if isinstance(value, float) else value
    for name in ("num_attention_heads", "num_key_value_heads"):
        config.setdefault(name, config.get("num_attention_heads"))
        if type(config[name]) is not int or config[name] < 1:
            key = f"{file.architecture}.{CONFIG[name]}"
            raise JspecError(f"{file.path}: {key} = {config[name]!r} should be a positive integer")
    if (embedding := file.tensors.get("model.embed_tokens.weight")) is not None:
        config.setdefault("vocab_size", embedding.shape[0])
    if (factor := _linear_factor(file, own)) is not None:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    config["tie_word_embeddings"] = "lm_head.weight" not in file.tensors
    config["attention_bias"] = any(name.endswith("_proj.bias") and "attn" in name for name in file.tensors)
    config["mlp_bias"] = any(name.endswith("_proj.bias") and "mlp" in name for name in file.tensors)
    if file.architecture == "gemma3":
        _gemma3_heads(config)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (value := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = value
    return config


def _gemma3_heads(config: dict[str, Any]) -> None:
    """The width of the heads, and what their scores are scaled by, as llama.cpp takes them."""
    share = config.get("hidden_size", 0) // config["num_attention_heads"]
    head_dim = config.setdefault("head_dim", share)
    big = config.get("num_hidden_layers") == GEMMA3_27B_LAYERS
    config["query_pre_attn_scalar"] = share if big else head_dim


def _own(file: GgufFile) -> dict[str, Any]:
    """The metadata of the architecture, without its name before the keys."""
    prefix = f"{file.architecture}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _refuse(file: GgufFile, own: dict[str, Any]) -> None:
    """Raise for what changes the maths in a way that config.json cannot say."""
    path, name = file.path, file.architecture
    if "rope_freqs.weight" in file.tensors:
        raise JspecError(
            f"{path}: rope_freqs.weight (llama3 RoPE scaling, baked in) is not supported: "
            "load the model from its safetensors"
        )
    _refuse_widths(file, own)
    known = {*CONFIG.values(), *ARCHITECTURES[name].config.values(), *CHECKED, *HARMLESS}
    for key in sorted(own.keys() - known):
        if key not in NEUTRAL or own[key] != NEUTRAL[key]:
            raise JspecError(
                f"{path}: {name}.{key} = {own[key]!r} is not known here and may change the maths"
            )


def _linear_factor(file: GgufFile, own: dict[str, Any]) -> float | None:
    """The number that positions are divided by, None for no scaling."""
    factor = own.get("rope.scaling.factor")
    # llama.cpp takes a factor without a type as linear.
    kind = own.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind not in ("none", "linear"):
        raise JspecError(
            f"{file.path}: {file.architecture}.rope.scaling.type {kind!r} is not supported "
            "(none and linear are)"
        )
    if kind == "none":
        return None
    if not isinstance(factor, float | int) or factor <= 0:
        name = f"{file.architecture}.rope.scaling.factor"
        raise JspecError(f"{file.path}: {name} = {factor!r} should be a positive number")
    return factor


def _refuse_widths(file: GgufFile, own: dict[str, Any]) -> None:
    """Heads must be rotated over their whole width, and be as wide in values as in keys."""
    width, heads = own.get("embedding_length"), own.get("attention.head_count")
    if not (type(width) is int and type(heads) is int and heads > 0):
        return  # the reader of the config says it better
    head_dim = own.get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise JspecError(
                f"{file.path}: {file.architecture}.{key} = {own[key]!r} is not supported: "
                f"heads have {head_dim} channels"
            )
