"""Reading a Hugging Face config.json strictly: what changes the maths is never ignored.

Every key is one that the family read, one known to be harmless, one that holds its
neutral value, or unknown (a warning). Anything else is a `ConfigError`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jspec.errors import JspecError
from jspec.models.layers import Rope


class ConfigError(JspecError):
    """A config.json that cannot be run as written; the message names the key."""


def unsupported(key: str, value: Any, rather: str) -> ConfigError:
    """The error of a key that would change the maths."""
    return ConfigError(f"config.json: {key} = {value!r} changes the maths and is not supported ({rather})")


HARMLESS = frozenset(
    """architectures auto_map bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id
    decoder_start_token_id unk_token_id attention_dropout hidden_dropout residual_dropout dropout
    embd_pdrop resid_pdrop attn_pdrop initializer_range model_type torch_dtype dtype
    transformers_version use_cache _name_or_path name_or_path _attn_implementation
    _attn_implementation_autoset output_attentions output_hidden_states return_dict
    gradient_checkpointing problem_type id2label label2id finetuning_task task_specific_params
    tokenizer_class prefix cache_implementation chunk_size_feed_forward transformers.js_config license
    is_llama_config unsloth_version unsloth_fixed
    """.split()
)

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers that ``layer_types`` may name."""

# Keys that change the maths of a decoder, with the values that mean "not used".
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "quantization": (None, {}),
    "rope_interleaved": (None, False),
    "sliding_window": (None,),
    "layer_types": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "qkv_bias": (None, False),
    "use_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "scale_emb": (None, 1, 1.0),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "query_pre_attn_scalar": (None,),
    "use_qk_norm": (None, False),
    "qk_norm": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0, 1),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_decoder": (None, False, True),
    "pruned_heads": (None, {}),
}


class Reader:
    """Takes values out of a config and remembers which keys were understood."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"config.json has no {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ConfigError(f"config.json: {key} = {value!r} should be {kind}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"config.json: {key} = {value!r} should be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} = {value!r} should be true or false")
        return value

    def require(self, key: str, expected: Any) -> None:
        value = self.get(key, expected)
        if value != expected:
            raise unsupported(key, value, f"only {expected!r} is")

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key, default=1.0)

    def rope(self) -> Rope:
        """RoPE settings: ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
        scaling = {**(self.get("rope_scaling") or {}), **(self.get("rope_parameters") or {})}
        return parse_rope(scaling, self.number("rope_theta", default=10000.0))

    def window(self, absent: int | None) -> int | None:
        """``sliding_window``: null means none, which a missing key need not."""
        self.seen.add("sliding_window")
        if self.config.get("sliding_window", absent) is None:
            return None
        return self.integer("sliding_window", absent)

    def layer_windows(
        self, layers: int, window: int | None, sliding: Callable[[int], bool]
    ) -> tuple[int | None, ...]:
        """Each layer's window, by ``layer_types`` or else by ``sliding``; () where there is none."""
        default = [SLIDING if sliding(index) else FULL for index in range(layers)]
        types = self.get("layer_types", default)
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigError(f"config.json: layer_types = {types!r} should name {layers} layers")
        if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
            raise unsupported("layer_types", unknown[0], f"{FULL} and {SLIDING} are")
        if SLIDING not in types:
            return ()
        if window is None:
            raise ConfigError(f"config.json: there are layers of {SLIDING}, but no sliding_window is in use")
        return tuple(window if kind == SLIDING else None for kind in types)

    def done(self) -> None:
        """Raise for a key that changes the maths, warn of one that nobody here knows."""
        for key in sorted(set(self.config) - self.seen - HARMLESS):
            value = self.config[key]
            if key in NEUTRAL:
                if value not in NEUTRAL[key]:
                    raise unsupported(key, value, f"{NEUTRAL[key][-1]!r} is")
            elif value is not None:
                warnings.warn(f"config.json: unknown key {key!r} = {value!r} was not used", stacklevel=3)


def parse_rope(settings: Mapping[str, Any], theta: float) -> Rope:
    """RoPE from one object of settings; ``theta`` where it has no ``rope_theta``. Raises `ConfigError`."""
    scaling = dict(settings)
    theta = Reader(scaling).number("rope_theta", default=theta)
    scaling.pop("rope_theta", None)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    names = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    if kind not in ("default", *names):
        raise unsupported("rope_type", kind, "default, linear and llama3 are")
    values: dict[str, Any] = {}
    for name in names.get(kind, ()):
        if name not in scaling:
            raise ConfigError(f"config.json: rope_scaling of type {kind!r} has no {name!r}")
        values[name] = float(scaling.pop(name))
    if kind == "llama3":
        values["original_max_length"] = scaling.pop("original_max_position_embeddings", 8192)
    if rest := {k: v for k, v in scaling.items() if v not in NEUTRAL.get(k, (None,))}:
        key, value = next(iter(rest.items()))
        raise unsupported(f"rope setting {key}", value, f"not for rope_type {kind!r}")
    return Rope(theta=theta, kind=kind, **values)
