"""Which kernels a device gets, and the plain code, with a logged reason, where there is none.

`select` names a set by device; each of its functions has the plain one's signature and
falls back to it, while it is traced, for shapes that its kernel cannot take. Reasons go to the
logger "jspec.pallas.select", once each.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jspec import cache as kv
from jspec.errors import JspecError
from jspec.models import layers
from jspec.pallas import law, verify
from jspec.sampling import walk

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Kernels:
    """Values for the builders: ``decide`` is a decoder's, the others are a model's."""

    name: str
    attend: Callable[..., Any] = layers.attend
    write: Callable[..., Any] = kv.write
    compact: Callable[..., Any] = kv.compact
    ring_multiple: int = 1  # slots, so that rings are whole tiles
    decide: Callable[..., Any] = walk.decide

    def of_model(self) -> dict[str, Any]:
        """The options of `jspec.models.decoder.make_layers`."""
        names = ("attend", "write", "compact", "ring_multiple")
        return {name: getattr(self, name) for name in names}

    @property
    def chosen(self) -> str:
        """What to ask `jspec.load` for, to get the same again."""
        return "plain" if self is PLAIN else "auto"


PLAIN = Kernels("plain")


def select(device: jax.Device | None = None) -> Kernels:
    """The kernels for a device (default: the first one); `PLAIN` on CPUs and unknown chips.

    Built once for each kind, so that decoders made with them are found again.

    >>> select(jax.devices("cpu")[0]).name
    'plain'
    """
    device = jax.devices()[0] if device is None else device
    return of_kind(device.platform, str(getattr(device, "compute_capability", "")))


@functools.cache
def of_kind(platform: str, capability: str = "") -> Kernels:
    """The kernels for a jax platform, and for a GPU's compute capability, "9.0" for Hopper."""
    if platform == "cpu":
        return PLAIN
    if platform == "tpu":
        from jspec.pallas import attention_tpu, compact_tpu, race_tpu, summarise_tpu

        return _guarded(
            "TPU",
            attention_tpu.attend,
            kv.write_windows,
            compact_tpu.compact,
            summarise_tpu.summarise,
            race_tpu.race,
        )
    if platform in ("gpu", "cuda") and capability.startswith("9."):
        from jspec.pallas import attention_gpu, compact_gpu, race_gpu, summarise_gpu

        return _guarded(
            "Hopper",
            attention_gpu.attend,
            kv.write,
            compact_gpu.compact,
            summarise_gpu.summarise,
            race_gpu.race,
        )
    log.warning("plain code: there are no kernels for %s %s", platform, capability)
    return PLAIN


def _guarded(
    name: str, attend: Callable, write: Callable, compact: Callable, summarise: Callable, race: Callable
) -> Kernels:
    decide = verify.make(
        or_plain("summarise", summarise, law.summarise_ref), or_plain("race", _threefry(race), law.race_ref)
    )
    # Under jit, so that layers of the same shape share one kernel: a program lowers it once.
    attend = jax.jit(attend, static_argnames=("scale", "window", "softcap"))
    return Kernels(
        name,
        attend=or_plain("attention", attend, layers.attend),
        write=write,
        compact=or_plain("commit", compact, kv.compact),
        ring_multiple=16,
        decide=decide,
    )


def _threefry(race: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(race)
    def checked(*args: Any, **options: Any) -> Any:
        if not getattr(jax.config, "jax_threefry_partitionable"):  # noqa: B009, mypy does not know it
            raise JspecError("it makes the noise of jax_threefry_partitionable=True, which is switched off")
        return race(*args, **options)

    return checked


@functools.cache
def _say(message: str) -> None:
    log.warning(message)


def or_plain(name: str, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, but the plain code for what it refuses with a `JspecError`."""

    @functools.wraps(plain)
    def chosen(*args: Any, **options: Any) -> Any:
        try:
            return kernel(*args, **options)
        except JspecError as limit:
            _say(f"{name}: plain code instead of the kernel: {limit}")
            return plain(*args, **options)

    return chosen
