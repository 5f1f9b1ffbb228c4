"""The text part of multimodal models, as the plain model of a family that it is.

Such a folder (Gemma 3 4B, LLaVA, Mistral Small 3.1, ...) has the decoder's settings in
``text_config``, without what equals the class's defaults, and the decoder's tensors under
longer names. Here both become those of a plain folder; what sees and hears is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.models import FAMILIES
from jspec.models.config import ConfigError, Reader, shown
from jspec.weights.base import Source, Tensor

TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "smolvlm": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
}
"""``model_type`` of a multimodal model -> that of its text part, where ``text_config`` does not say it."""

MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "glm4v")
"""Models that look alike but whose positions are three numbers."""

PLACE = "text_config."
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""The class that a plain config.json of a family names, for those who read what `jspec convert` writes."""
SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "transformers_version")
"""Keys that may stand at the top level and hold for the text part."""
OTHERS_KEY = re.compile(
    r"(image|vision|video|audio|mm|multimodal|projector|boi|eoi|pixel|spatial|downsample)_.*"
    r"|ignore_index|scale_factor|use_image_newline_parameter|_pad_token_id"
)
"""Keys of the top level that are about images, video and sound."""

RENAMED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""How the names of the text part's tensors begin, and how those of a plain model do."""
OTHERS_TENSOR = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_resampler|image_tower|video_tower|image_newline"
    r"|multi_modal_projector|connector)\b.*"
)
"""Tensors of the other parts."""


def text_config(config: Mapping[str, Any], has_head: bool | None) -> dict[str, Any]:
    """The config.json that the text part has as a plain model; ``model_type`` is one of `TEXT_PARTS`.

    ``has_head``: whether the tensors have one, which says whether the embedding is the head too
    where the config does not, or says both; None: not known. Raises `ConfigError`.
    """
    read = Reader(config)
    inner = read.nested("text_config")
    if not inner.config:
        raise read.error("text_config", "an object with the settings of the text part")
    kind = inner.text("model_type", default=TEXT_PARTS[config["model_type"]])
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"config.json: {PLACE}model_type = {shown(kind)} is not supported (supported: {known})"
        )
    defaults = FAMILIES[kind].DEFAULTS
    tied = _tied(read, inner, has_head, defaults.get("tie_word_embeddings", False))
    read.inside.clear()  # the family reads it
    read.seen |= {*defaults, *(key for key in config if OTHERS_KEY.fullmatch(key))}
    read.done()
    shared = {key: config[key] for key in SHARED if config.get(key) is not None}
    plain = dict(model_type=kind, tie_word_embeddings=tied)
    known_class = {"architectures": [ARCHITECTURES[kind]]} if kind in ARCHITECTURES else {}
    return {**defaults, **inner.config, **shared, **plain, **known_class}


def _tied(read: Reader, inner: Reader, has_head: bool | None, silent: bool) -> bool:
    """Whether the embedding is the head too."""
    key = "tie_word_embeddings"
    said = [one.flag(key) for one in (inner, read) if one.get(key) is not None]
    if len(set(said)) == 1:
        return said[0]
    if has_head is None:
        return said[0] if said else silent
    return not has_head


class TextTensors:
    """The tensors of the text part, under the names of a plain model; a `Source` around another."""

    def __init__(self, source: Source):
        self.path = source.path
        self.tensors: dict[str, Tensor] = {}
        self.twice = [plain_name(name) for name in source.twice]
        self._source = source
        self._name: dict[str, str] = {}
        for name, tensor in source.tensors.items():
            if OTHERS_TENSOR.fullmatch(name):
                continue
            plain = plain_name(name)
            if plain in self.tensors:
                self.twice.append(plain)
            self.tensors[plain], self._name[plain] = tensor, name

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._source.rows(self._name[name], start, stop)


def plain_name(name: str) -> str:
    """The name that a tensor of the text part has in a plain model; any other name stays as it is.

    >>> plain_name("language_model.model.norm.weight"), plain_name("model.language_model.norm.weight")
    ('model.norm.weight', 'model.norm.weight')
    """
    for old, new in RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
