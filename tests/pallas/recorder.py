"""Listen to the TPU interpreter: how many bytes it copies between HBM and the cores."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter


class Copied(NamedTuple):
    read: list[int]  # bytes of each copy out of HBM
    written: list[int]  # bytes of each copy into HBM

    @property
    def totals(self) -> tuple[int, int]:
        return sum(self.read), sum(self.written)


@contextlib.contextmanager
def recorder(monkeypatch) -> Iterator[Copied]:
    """Record what is interpreted inside the context. A function must be traced inside it too."""
    copied, lock = Copied([], []), threading.Lock()  # two simulated cores are two threads
    get, store, dma = interpreter.get, interpreter.store, interpreter.DMA

    def note(sizes: list[int], size: int) -> None:
        with lock:
            sizes.append(size)

    def recorded_get(*args, **kwargs):
        token, value = get(*args, **kwargs)
        if kwargs.get("input_name") is not None:  # a block, before the body runs
            note(copied.read, value.nbytes)
        return token, value

    def recorded_store(token, device, core, space, buffer, transforms, value, *args, **kwargs):
        if kwargs.get("output_name") is not None:
            note(copied.written, value.nbytes)
        return store(token, device, core, space, buffer, transforms, value, *args, **kwargs)

    def in_hbm(space: int) -> bool:
        return str(interpreter.TPU_MEMORY_SPACE_NAMES[space]) == "hbm"

    read_and_write = dma.execute_read

    def recorded_read(self):
        fresh = self.state == interpreter.DmaState.STARTED
        read_and_write(self)
        if fresh:
            if in_hbm(self.src_memory_space):
                note(copied.read, self.data.nbytes)
            if in_hbm(self.dst_memory_space):
                note(copied.written, self.data.nbytes)

    recorded_get.__wrapped__, recorded_store.__wrapped__ = get.__wrapped__, store.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "get", recorded_get)
        patch.setattr(interpreter, "store", recorded_store)
        patch.setattr(dma, "execute_read", recorded_read)
        yield copied
