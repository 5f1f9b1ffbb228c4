"""The loop seen from the host: a Python loop around `Decoder.step`, and the one function that reads.

Everything that comes from the device to the host comes through `fetch`, which counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jspec.decode import Decoder
from jspec.types import RUNNING, Info, Params, State

T = TypeVar("T")


@dataclass
class Clock:
    """Seconds spent in the two halves of `stream`'s rounds, device work included."""

    draft: float = 0.0
    verify: float = 0.0

    def timed(self, half: str, function: Callable[..., T], *args: Any) -> T:
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        setattr(self, half, getattr(self, half) + time.perf_counter() - start)
        return result


def one_round(
    decoder: Decoder, params: Params, draft_params: Params, state: State, clock: Clock | None = None
) -> tuple[State, Info]:
    """`Decoder.step`, with its info read to the host; with a ``clock`` in two timed halves."""
    if clock is None:
        state, info = decoder.step(params, draft_params, state)
    else:
        proposal, state = clock.timed("draft", decoder.propose, params, draft_params, state)
        state, info = clock.timed("verify", decoder.advance, params, draft_params, state, proposal)
    return state, fetch(info)


def stream(
    decoder: Decoder, params: Params, draft_params: Params, state: State, clock: Clock | None = None
) -> Iterator[tuple[State, Info]]:
    """Yield after every round the state and, read to the host, what the round brought.

    The same tokens as `Decoder.run`. A yielded state is good until the next round is
    asked for.
    """
    while True:
        state, info = one_round(decoder, params, draft_params, state, clock)
        yield state, info
        if (info.finish != RUNNING).all():
            return


host_reads = 0
"""How often `fetch` has read from the device; the only function that does."""


def fetch(values: T) -> T:
    """Read a pytree of device arrays to the host, waiting for them, and count it."""
    global host_reads
    host_reads += 1
    return jax.device_get(values)
