"""Check the GPU kernels on a real GPU and time them: ``make gpu-check PYTHON=...``, ten minutes at most.

    python benchmarks/gpu_check.py [--only NAME] [--repeat 30] [--minutes 9] [--dry-run]

It needs a CUDA GPU of the Hopper generation and a jax that sees it, and installs nothing.
Each GPU case of `kernel_cases.py` is compared with its plain reference at a tiny and at its
real size; then both are timed in turn with a large copy on the device, medians of many
rounds. Reported are ratios: the kernel's time over the plain code's, and over the time that
the bytes it moves (`tools.traffic`) take at the speed of that copy. A line of JSON
for each case, and a table at the end. It ends with 1 when a kernel is wrong, with 2 where
there is no GPU. ``--dry-run``: tiny sizes in the interpreter, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import CASES, Case

from jspec.pallas import compat
from tools import traffic

COPY_BYTES = 1 << 30
ROUND_SECONDS = 2e-3  # a clock and a launch cost microseconds: that many calls are timed at once


def worst(found: Any, expected: Any) -> float:
    """The greatest difference of two trees; infinite where shapes, NaNs or infinities differ."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(x).astype(np.float64) for x in (one, other))
        if one.shape != other.shape or not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return float("inf")
        differs = ~((one == other) | (np.isnan(one) & np.isnan(other)))
        if differs.any():
            finite = np.isfinite(one[differs]).all()
            worst = max(worst, float(np.abs(one[differs] - other[differs]).max()) if finite else np.inf)
    return worst


def on_device(case: Case, tiny: bool) -> list[Any]:
    """Fresh inputs, for a call may give them away."""
    return [jax.tree.map(jnp.asarray, x) for x in case.inputs(tiny)]


def compiled(case: Case, interpret: Any) -> tuple[Callable, Callable]:
    """The kernel and its reference."""

    def kernel(*inputs):
        return case.kernel(*inputs, interpret=interpret)

    return tuple(jax.jit(f, donate_argnums=case.donate) for f in (kernel, case.reference))


def repeated(function: Callable, case: Case, tiny: bool) -> Callable[[int], float]:
    """Seconds a call, when it is made so many times. What is given away comes back as the result."""
    inputs = on_device(case, tiny)

    def run(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            out = function(*inputs)
            if case.donate:
                inputs[case.donate[0]] = out
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls

    return run


def copies(size: int) -> Callable[[int], float]:
    """The same for what reads so many bytes and writes as many."""
    source, copy = jnp.zeros(size // 4, jnp.float32), jax.jit(lambda x: x + 1)

    def run(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            out = copy(source)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls

    return run


def medians(runs: list[Callable[[int], float]], repeat: int) -> list[float]:
    """Median seconds of each, taken in turn."""
    for run in runs:
        run(1)  # compiles
    calls = [max(1, min(200, int(ROUND_SECONDS / run(1)))) for run in runs]
    rounds = [[run(count) for run, count in zip(runs, calls, strict=True)] for _ in range(repeat)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def check(case: Case, dry: bool, repeat: int) -> dict[str, Any]:
    """Compare, count and time one case."""
    interpret = compat.gpu_interpreter() if dry else False
    kernel, reference = compiled(case, interpret)
    differences = [
        worst(kernel(*on_device(case, tiny)), reference(*on_device(case, tiny)))
        for tiny in ([True] if dry else [True, False])
    ]
    found = {"case": case.name, "difference": max(differences), "tolerance": case.tolerance}
    found["ok"] = max(differences) <= case.tolerance and not compat.races_found()
    moved = traffic.count(case.counted or case.kernel, *case.inputs(dry))
    size = 1 << 12 if dry else COPY_BYTES
    runs = [repeated(kernel, case, dry), repeated(reference, case, dry), copies(size)]
    seconds, plain, copy = medians(runs, repeat)
    speed = 2 * size / copy
    found |= {"bytes": moved.total, "us": seconds * 1e6, "plain_us": plain * 1e6, "copy_GB_s": speed / 1e9}
    found |= {"of_plain": seconds / plain, "of_roofline": seconds * speed / max(moved.total, 1)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--dry-run", action="store_true", help="interpreters and tiny sizes, on any machine")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.dry_run:
        seen = f"jax {jax.__version__} sees {device.device_kind}"
        print(f"gpu-check: there is no GPU here, {seen}: nothing is checked")
        return 2
    print(json.dumps({"device": device.device_kind, "jax": jax.__version__, "dry_run": options.dry_run}))
    deadline, rows = time.monotonic() + 60 * options.minutes, []
    for case in CASES:
        if case.platform != "gpu" or case.fails or options.only not in case.name:
            continue
        if time.monotonic() > deadline:
            row = {"case": case.name, "ok": False, "error": "not reached in time"}
        else:
            try:
                row = check(case, options.dry_run, options.repeat)
            except Exception as error:  # the other kernels are still worth a look
                row = {"case": case.name, "ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
        print(json.dumps(row), flush=True)
        rows.append(row)
    print(f"\n{'kernel':28}  ok  difference    time us  of plain  of roofline")
    for row in rows:
        if "error" in row:
            print(f"{row['case']:28}  no  {row['error'].splitlines()[0][:90]}")
            continue
        ok, ratios = "yes" if row["ok"] else "NO", f"{row['of_plain']:8.2f}  {row['of_roofline']:11.2f}"
        print(f"{row['case']:28} {ok:>3}  {row['difference']:10.2g} {row['us']:10.1f}  {ratios}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
