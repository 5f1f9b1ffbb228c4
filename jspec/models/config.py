"""Reading a Hugging Face config.json strictly: what changes the maths is never ignored.

Every key is one that the family read, one known to be harmless, one that holds its
neutral value, or unknown (a warning). Anything else is a `ConfigError`. Objects inside
the file go through the same checks, with their place in the messages
(``rope_scaling.factor``).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jspec.errors import JspecError

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers that ``layer_types`` may name."""
LEAST_NUMBER, MOST_NUMBER = 1e-20, 1e20
"""Between these float32 neither overflows nor loses a number, whatever a model does with it."""
MOST_INTEGER = 2**31 - 1
MOST_LAYERS = 10_000


class ConfigError(JspecError):
    """A config.json that cannot be run as written; the message names the key."""


def shown(value: Any) -> str:
    """A value as config.json has it, cut where it is long.

    >>> shown(None), shown("two"), shown([1] * 50)
    ('null', '"two"', '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,...')
    """
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unsupported(key: str, value: Any, rather: str) -> ConfigError:
    """The error of a key that would change the maths."""
    return ConfigError(
        f"config.json: {key} = {shown(value)} changes the maths and is not supported ({rather})"
    )


HARMLESS = frozenset(
    """architectures auto_map bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id
    decoder_start_token_id unk_token_id attention_dropout hidden_dropout residual_dropout dropout
    embd_pdrop resid_pdrop attn_pdrop initializer_range model_type torch_dtype dtype
    transformers_version use_cache _name_or_path name_or_path _attn_implementation
    _attn_implementation_autoset output_attentions output_hidden_states return_dict
    gradient_checkpointing problem_type id2label label2id finetuning_task task_specific_params
    tokenizer_class prefix cache_implementation chunk_size_feed_forward transformers.js_config license
    is_llama_config unsloth_version unsloth_fixed is_composition
    """.split()
)

# Keys that change the maths of a decoder, with the values that mean "not used".
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "quantization": (None, {}),
    "compression_config": (None, {}),
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


def same(value: Any, other: Any) -> bool:
    """Whether two values of a config.json are the same: 1 is 1.0, and true is no number.

    >>> same(1, 1.0), same(1, True)
    (True, False)
    """
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class Reader:
    """Takes values out of a config, each checked, and remembers which keys were understood.

    null counts as an absent key. ``place``: the key of this object in its file, with a dot
    behind it, or "" for the whole file. ``strict``: a key that nobody read is an error.

    >>> read = Reader({"hidden_size": 32, "rope_scaling": {"factor": "two"}})
    >>> read.integer("hidden_size")
    32
    >>> read.nested("rope_scaling").number("factor")
    Traceback (most recent call last):
    jspec.models.config.ConfigError: config.json: rope_scaling.factor = "two" should be a positive number
    """

    def __init__(self, config: Mapping[str, Any], place: str = "", strict: bool = False):
        self.config = config
        self.place = place
        self.strict = strict
        self.seen: set[str] = set()
        self.inside: list[Reader] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, unchecked."""
        self.seen.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def error(self, key: str, should: str) -> ConfigError:
        """The error of a key that is absent, or whose value is not what it should be."""
        if key not in self.config:
            return ConfigError(f"config.json has no {self.place + key!r}, which should be {should}")
        return ConfigError(f"config.json: {self.place}{key} = {shown(self.config[key])} should be {should}")

    def unsupported(self, key: str, rather: str) -> ConfigError:
        """The error of a key whose value would change the maths."""
        return unsupported(self.place + key, self.config.get(key), rather)

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = MOST_INTEGER) -> int:
        """A whole number within bounds; without ``default`` it has to be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            in_words = f"a whole number from {least} to {most}"
            if most == MOST_INTEGER and not (type(value) is int and value > most):
                in_words = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.error(key, in_words)
        return value

    def number(self, key: str, default: float | None = None, least: float = LEAST_NUMBER) -> float:
        """A finite number of at least ``least``; without ``default`` it has to be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value, least):
            in_words = "a positive number" if least == LEAST_NUMBER else f"a number of at least {least:g}"
            raise self.error(key, in_words)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None where there is none."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """So many positive numbers."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_number, value)):
            raise self.error(key, f"a list of {count} positive numbers")
        return tuple(map(float, value))

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers of at least 0; empty where there is none."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            raise self.error(key, "a list of whole numbers")
        return value

    def require(self, key: str, expected: Any) -> None:
        """Nothing but ``expected``, which an absent key means too."""
        if not same(self.get(key, expected), expected):
            raise self.unsupported(key, f"only {shown(expected)} is")

    def nested(self, key: str, strict: bool = False) -> Reader:
        """The `Reader` of an object inside; of an empty one where there is none."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        self.inside.append(Reader(value, f"{self.place}{key}.", strict))
        return self.inside[-1]

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Say what absent keys mean."""
        self.config = {**defaults, **{key: one for key, one in self.config.items() if one is not None}}

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
            raise self.error("layer_types", f"a list that names {layers} layers")
        if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
            raise unsupported(f"{self.place}layer_types", unknown[0], f"{FULL} and {SLIDING} are")
        if SLIDING not in types:
            return ()
        if window is None:
            raise ConfigError(
                f"config.json: there are layers of {SLIDING}, but no {self.place}sliding_window is in use"
            )
        return tuple(window if kind == SLIDING else None for kind in types)

    def done(self) -> None:
        """Raise for a key that changes the maths, warn of one that nobody here knows."""
        for inner in self.inside:
            inner.done()
        for key in sorted(set(self.config) - self.seen - (frozenset() if self.strict else HARMLESS)):
            value = self.config[key]
            if key in NEUTRAL:
                if not any(same(value, neutral) for neutral in NEUTRAL[key]):
                    raise self.unsupported(key, f"{shown(NEUTRAL[key][-1])} is")
            elif value is not None:
                if self.strict:
                    raise self.unsupported(key, "nothing here reads it")
                message = f"config.json: unknown key {self.place + key!r} = {shown(value)} was not used"
                warnings.warn(message, stacklevel=3)


def _is_number(value: Any, least: float = LEAST_NUMBER) -> bool:
    """Neither a bool, nor infinite, nor so small or great that float32 would make it so."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= MOST_NUMBER
