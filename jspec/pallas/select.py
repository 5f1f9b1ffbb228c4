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

from jspec.cache import dense
from jspec.errors import JspecError
from jspec.models import layers
from jspec.pallas.verify import fused, reference
from jspec.sampling import walk

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Kernels:
    """Values for the builders: ``decide`` is a decoder's, the others are a model's."""

    name: str
    attend: Callable[..., Any] = layers.attend
    write: Callable[..., Any] = dense.write
    compact: Callable[..., Any] = dense.compact
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
        from jspec.pallas.attention.tpu import attend_tpu
        from jspec.pallas.commit.tpu import compact_tpu
        from jspec.pallas.verify.gumbel_argmax_tpu import gumbel_argmax_tpu
        from jspec.pallas.verify.row_stats_tpu import row_stats_tpu

        return _guarded(
            "TPU",
            attend_tpu,
            dense.write_windows,
            compact_tpu,
            row_stats_tpu,
            gumbel_argmax_tpu,
        )
    if platform in ("gpu", "cuda") and capability.startswith("9."):
        from jspec.pallas.attention.gpu import attend_gpu
        from jspec.pallas.commit.gpu import compact_gpu
        from jspec.pallas.verify.gumbel_argmax_gpu import gumbel_argmax_gpu
        from jspec.pallas.verify.row_stats_gpu import row_stats_gpu

        return _guarded(
            "Hopper",
            attend_gpu,
            dense.write,
            compact_gpu,
            row_stats_gpu,
            gumbel_argmax_gpu,
        )
    log.warning("plain code: there are no kernels for %s %s", platform, capability)
    return PLAIN


def _guarded(
    name: str,
    attend: Callable,
    write: Callable,
    compact: Callable,
    row_stats: Callable,
    gumbel_argmax: Callable,
) -> Kernels:
    decide = fused.make(
        or_plain("row_stats", row_stats, reference.row_stats_ref),
        or_plain("gumbel_argmax", _threefry(gumbel_argmax), reference.gumbel_argmax_ref),
    )
    # Under jit, so that layers of the same shape share one kernel: a program lowers it once.
    attend = jax.jit(attend, static_argnames=("scale", "window", "softcap"))
    return Kernels(
        name,
        attend=or_plain("attention", attend, layers.attend),
        write=write,
        compact=or_plain("commit", compact, dense.compact),
        ring_multiple=16,
        decide=decide,
    )


def _threefry(gumbel_argmax: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gumbel_argmax)
    def checked(*args: Any, **options: Any) -> Any:
        if not getattr(jax.config, "jax_threefry_partitionable"):  # noqa: B009, mypy does not know it
            raise JspecError("it makes the noise of jax_threefry_partitionable=True, which is switched off")
        return gumbel_argmax(*args, **options)

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
