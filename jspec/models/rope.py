"""Rotary position embedding (arXiv 2104.09864): its kinds, what config.json says of them, the rotation.

The frequencies of a model are constants here, the same for every text, for a cached key was
turned once and for all. In transformers two kinds let them depend on the length of the text so
far, so that keys cached before a threshold and keys after it are turned in different ways. Here:

* **dynamic** (NTK): transformers has the plain frequencies up to the original length, and new
  ones at each length beyond. Here the original length is the context length: up to there the
  two agree for every text, and longer texts are refused.
* **longrope**: transformers has ``short_factor`` up to the original length, ``long_factor`` beyond.
  Here the context length decides, as in vLLM: a model whose ``max_position_embeddings`` is above
  its original length takes ``long_factor`` for every text. One pass of transformers over a text
  longer than the original length gives the same; over a shorter text it does not. For those,
  set ``max_position_embeddings`` in config.json to the original length (and ``factor``, where it
  is absent, to their former ratio): then ``short_factor`` holds for every text, as in transformers.

A kind is one function that reads its settings, a line of `KINDS`, and its frequencies in
`rope_frequencies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.models.config import FULL, SLIDING, ConfigError, Reader, shown

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding in the half-split layout: pair c is channels c and c + C/2.

    ``kind``:

    * "default": pair c turns by ``theta ** (-2c / C)`` radians a position;
    * "linear": positions are divided by ``factor``;
    * "dynamic": the default, up to ``original_context_length`` (see the module);
    * "llama3": low frequencies are divided, high ones kept, a ramp between (Llama 3.1);
    * "yarn": the same with other bounds, and cos and sin multiplied by ``attention_factor``
      (arXiv 2309.00071);
    * "longrope": each pair's frequency is divided by its own of ``factors``, and cos and sin
      multiplied by ``attention_factor`` (arXiv 2402.13753).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def rope_frequencies(rope: Rope, head_dim: int) -> Float[Array, "half"]:
    """Radians a position for each channel pair, in float32.

    >>> rope_frequencies(Rope(theta=100.0), 4).tolist()
    [1.0, 0.1]
    >>> rope_frequencies(Rope(100.0, "linear", factor=2.0), 4).tolist()
    [0.5, 0.05]
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context_length * frequency / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequency * (keep + (1 - keep) / rope.factor)
    if rope.kind == "yarn":
        first, last = _yarn_bounds(rope, head_dim)
        keep = 1 - jnp.clip((jnp.arange(head_dim // 2) - first) / (last - first), 0.0, 1.0)
        return 1.0 / (rope.factor * rope.theta**exponent) * (1 - keep) + frequency * keep
    if rope.kind == "longrope":
        return 1.0 / (jnp.array(rope.factors, jnp.float32) * rope.theta**exponent)
    return frequency


def _yarn_bounds(rope: Rope, head_dim: int) -> tuple[float, float]:
    """YaRN's ramp: pairs up to the first keep their frequency, from the last on it is divided."""

    def pair(turns: float) -> float:
        """The pair, a real number, that turns so many times within the original length."""
        ratio = rope.original_context_length / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, head_dim - 1.0)
    return first, last + 0.001 if first == last else last  # as in the original code


def rotate(
    x: Float[Array, "B T H C"],
    position: Int[Array, "B T"],
    frequency: Float[Array, "half"],
    scale: float = 1.0,
) -> Float[Array, "B T H C"]:
    """Turn each channel pair (c, c + C/2) by ``position * frequency``, and multiply by ``scale``.

    Computed in float32, whatever the dtype of x, which the result has.

    >>> quarter = jnp.array([jnp.pi / 2])
    >>> rotate(jnp.array([[[[1.0, 0.0]]]]), jnp.array([[1]]), quarter).round(3).tolist()
    [[[[0.0, 1.0]]]]
    """
    angle = position[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


@dataclass(frozen=True)
class Sizes:
    """What the settings of one kind may refer to."""

    head_dim: int
    context_length: int  # max_position_embeddings
    original: int | None  # original_max_position_embeddings of the whole file, which comes first


def read_ropes(
    read: Reader,
    fields: Mapping[str, Any],
    windows: tuple[int | None, ...] = (),
    theta: float = 10000.0,
    window_theta: float | None = None,
) -> dict[str, Any]:
    """The fields ``rope``, ``window_rope`` and ``context_length`` of a decoder's config.

    Settings are ``rope_parameters`` (transformers 5), for all layers or for each kind of layer,
    or ``rope_theta`` and ``rope_scaling``. Raises `ConfigError`, naming the key.

    Args:
        read: the config.
        fields: ``head_dim`` and ``context_length``.
        windows: of the layers, () where none has one.
        theta: what no ``rope_theta`` means.
        window_theta: what no ``rope_local_base_freq`` means, in a family whose layers with a
            window have their own RoPE whatever the config says; None: in no such family.
    """
    original = read.integer(ORIGINAL) if read.get(ORIGINAL) is not None else None
    sizes = Sizes(fields["head_dim"], fields["context_length"], original)
    scaling, parameters = (read.nested(key, strict=True) for key in ("rope_scaling", "rope_parameters"))
    theta = read.number("rope_theta", default=theta, least=1.0)
    own, window_rope = window_theta is not None, None
    if own or FULL in parameters.config or SLIDING in parameters.config:
        full, window = parameters.nested(FULL, strict=True), parameters.nested(SLIDING, strict=True)
        for kind, inner in ((FULL, full), (SLIDING, window)):
            used = any((kind == SLIDING) == (one is not None) for one in windows or (None,))
            if used and not inner.config and not own:
                raise parameters.error(kind, "an object: there are such layers")
        local = theta
        if window_theta is not None:
            local = read.number("rope_local_base_freq", default=window_theta, least=1.0)
        rope, window_rope = _agreed([scaling, full], theta, sizes), read_rope(window, local, sizes)
    else:
        rope = _agreed([scaling, parameters], theta, sizes)
    lengths = [r.original_context_length for r in (rope, window_rope) if r and r.kind == "dynamic"]
    return dict(rope=rope, window_rope=window_rope, context_length=min([sizes.context_length, *lengths]))


def _agreed(settings: list[Reader], theta: float, sizes: Sizes) -> Rope:
    """The RoPE of settings that may stand in two places, of which one is enough."""
    ropes = [read_rope(read, theta, sizes) for read in settings if read.config]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        names = " and ".join(read.place.removesuffix(".") for read in settings)
        raise ConfigError(f"config.json: {names} ask for different things: keep one of them")
    return ropes[0] if ropes else Rope(theta)


def read_rope(read: Reader, theta: float, sizes: Sizes) -> Rope:
    """RoPE from one object of settings; ``theta`` where it has no ``rope_theta``. Raises `ConfigError`."""
    theta = read.number("rope_theta", default=theta, least=1.0)
    older = read.text("type", default="default")
    kind = read.text("rope_type", default=older)
    if kind not in KINDS:
        key = "type" if read.get("rope_type") is None else "rope_type"
        raise read.unsupported(key, f"{', '.join(KINDS)} are")
    if read.get("type", kind) != kind:
        raise read.error("type", f"the rope_type, {shown(kind)}, or absent")
    return KINDS[kind](read, theta, sizes)


def _plain(read: Reader, theta: float, sizes: Sizes) -> Rope:
    return Rope(theta)


def _linear(read: Reader, theta: float, sizes: Sizes) -> Rope:
    return Rope(theta, "linear", read.number("factor"))


def _dynamic(read: Reader, theta: float, sizes: Sizes) -> Rope:
    length = read.integer(ORIGINAL, default=sizes.original or sizes.context_length)
    return Rope(theta, "dynamic", read.number("factor"), original_context_length=length)


def _llama3(read: Reader, theta: float, sizes: Sizes) -> Rope:
    low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
    if low >= high:
        raise read.error("low_freq_factor", f"less than high_freq_factor = {shown(high)}")
    return Rope(
        theta,
        "llama3",
        read.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=_original(read, sizes),
    )


def _yarn(read: Reader, theta: float, sizes: Sizes) -> Rope:
    if theta == 1.0:
        raise ConfigError(f"config.json: rope_theta = 1 should be above 1 for {read.place}rope_type yarn")
    factor, attention = read.number("factor"), read.optional_number("attention_factor")
    mscale, all_dim = read.optional_number("mscale"), read.optional_number("mscale_all_dim")
    if attention is None and mscale is not None and all_dim is not None:
        attention = _yarn_attention(factor, mscale) / _yarn_attention(factor, all_dim)
    if attention is None:  # one of the two alone counts as none, as in transformers
        attention = _yarn_attention(factor)
    fast, slow = read.number("beta_fast", default=32.0), read.number("beta_slow", default=1.0)
    if fast < slow:
        raise read.error("beta_fast", f"at least beta_slow = {shown(slow)}")
    if "truncate" in read.config and read.config["truncate"] is None:
        raise read.error("truncate", "true or false")  # transformers takes null for false
    return Rope(
        theta,
        "yarn",
        factor,
        original_context_length=_original(read, sizes),
        attention_factor=attention,
        beta_fast=fast,
        beta_slow=slow,
        truncate=read.flag("truncate", default=True),
    )


def _yarn_attention(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by, to sharpen attention over a longer context."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(read: Reader, theta: float, sizes: Sizes) -> Rope:
    original, attention = _original(read, sizes), read.optional_number("attention_factor")
    if original < 2:
        raise ConfigError(f"config.json: {read.place}{ORIGINAL} = {original} should be at least 2")
    short, long = (read.numbers(key, sizes.head_dim // 2) for key in ("short_factor", "long_factor"))
    factor = read.number("factor", default=sizes.context_length / original)
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = long if sizes.context_length > original else short
    return Rope(
        theta, "longrope", original_context_length=original, attention_factor=attention, factors=factors
    )


def _original(read: Reader, sizes: Sizes) -> int:
    """The length that the model was first trained on, as transformers finds it."""
    own = read.integer(ORIGINAL) if ORIGINAL in read.config else sizes.context_length
    return sizes.original or own


KINDS: dict[str, Callable[[Reader, float, Sizes], Rope]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""``rope_type`` of a config.json -> what reads its settings."""
