"""Compile the kernels and a whole step for TPUs and the H100, without one: ``make aot``.

    python benchmarks/aot.py [--chip v5e --chip h100 ...] [--only STEP_OR_KERNEL]

The cases are those of `kernel_cases.py`, and ``step``: one round of the loop for
Llama-3.1-8B, drafts by a model of Llama-3.2-1B's shapes, K = 4, one row of 8192 slots in
bfloat16, on as many chips as hold it: with the kernels that `jspec.pallas.select` picks on
one chip, in plain code on several. For each: seconds to compile, bytes of arguments and
temporaries, bytes updated in place ("alias"), and how many copies as large as the logits (of
a kernel: as its largest input) the program makes. It ends with 1 when a case fails, is not
refused though it should be, does not fit the chip's memory, or passes a limit.

TPU programs need the wheel ``libtpu``; programs for the H100 those of jax's CUDA plugin and
a toolkit's ptxas. What is missing is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


class Chip(NamedTuple):
    platform: str
    topology: str
    memory: float  # GB each
    count: int = 1  # for the whole step


CHIPS = {  # those that take longest first
    "v6e": Chip("tpu", "v6e:2x2", 32),
    "v5e": Chip("tpu", "v5e:2x2", 16, count=4),
    "v5p": Chip("tpu", "v5p:2x2x1", 95),
    "h100": Chip("gpu", "1x1x1", 80),
}
# XLA's GpuTargetConfigProto of an H100 SXM: what the compiler asks of a device.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
NODES, SLOTS, VOCAB = 5, 8192, 128256
STEP = "step"
COPY = re.compile(r"= \(?\w+\[([\d,]+)\](\{[^}]*\})?[^=\n]* (?:copy|copy-start|transpose|pad)\(")


class Outcome(NamedTuple):
    """A compiled case; bytes are a chip's."""

    case: str
    chip: str
    seconds: float = 0.0
    arguments: int = 0
    temporaries: int = 0
    alias: int = 0
    copies: int | None = None  # jax 0.10 cannot print some of the TPU's programs
    fault: str = ""


def topology(name: str) -> list[Any]:
    """The devices of a chip that is not there."""
    from jax.experimental import topologies

    chip = CHIPS[name]
    if chip.platform == "tpu":
        return topologies.get_topology_desc(chip.topology, platform="tpu").devices
    return topologies.get_topology_desc("", "cuda", target_config=H100, topology=chip.topology).devices


def placed(mesh: Any, tree: Any, spec: Any) -> Any:
    """Abstract arrays on a mesh; ``spec(path, leaf)`` says how each is sharded."""
    import jax
    from jax.sharding import NamedSharding

    def place(path, leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec(path, leaf)))

    return jax.tree_util.tree_map_with_path(place, tree)


def step(mesh: Any, platform: str) -> tuple[Any, tuple]:
    """The compiled loop's step and its abstract arguments, weights and caches sharded over the heads."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from jspec import make_decoder
    from jspec.models import llama
    from jspec.models.layers import Weight
    from jspec.pallas import select
    from jspec.sampling import policy, verifiers
    from jspec.sampling.drafters.draft_model import draft_model
    from jspec.types import Request

    target = llama.Config(VOCAB, 4096, 14336, 32, 32, 8, 128, 131072)
    draft = llama.Config(VOCAB, 2048, 8192, 16, 32, 8, 64, 131072, tied=True)
    # Kernels are not partitioned by XLA: on several chips they need a shard_map around them.
    kernels = select.of_kind(platform, "9.0") if mesh.size == 1 else select.PLAIN
    models = [llama.make(c, dtype=jnp.bfloat16, **kernels.of_model()) for c in (target, draft)]
    drafter = draft_model(models[1], NODES - 1)
    decoder = make_decoder(models[0], drafter, verifiers.token, decide=kernels.decide)

    def weight(w: Weight):
        spec = P(*("chips" if a in ("heads", "kv_heads", "mlp", "vocab") else None for a in w.axes))
        return placed(mesh, jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), lambda path, leaf: spec)

    params = [jax.tree.map(weight, llama.weights(config)) for config in (target, draft)]
    request = jax.eval_shape(
        lambda: Request(
            tokens=jnp.zeros((1, SLOTS), jnp.int32),
            length=jnp.zeros(1, jnp.int32),
            max_length=jnp.zeros(1, jnp.int32),
            stop_token_ids=jnp.zeros((1, 4), jnp.int32),
            policy=jax.tree.map(jnp.asarray, policy.make(1, VOCAB)),
            key=jnp.zeros((1, 2), jnp.uint32),
        )
    )
    state = jax.eval_shape(decoder.init, *params, request)

    def by_head(path, leaf):
        return P(None, "chips") if leaf.ndim == 4 else P()  # [B, K, S, C]

    return decoder.step, (*params, placed(mesh, state, by_head))


def compile_case(name: str, case: Any, chip: str, devices: list[Any]) -> Outcome:
    """Compile one case and read the program. ``case`` is a `kernel_cases.Case`; None is the step."""
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(devices[: 1 if case else CHIPS[chip].count]), ("chips",))
    if case:
        function = jax.jit(case.kernel, donate_argnums=case.donate)
        args = placed(mesh, case.inputs(False), lambda path, leaf: P())
        watched = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(args))
    else:
        function, args = step(mesh, CHIPS[chip].platform)
        watched = NODES * VOCAB // mesh.size
    began = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # it names the chip
            program = function.lower(*args).compile()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        refused = case and case.fails and case.fails.lower() in text.lower()
        return Outcome(name, chip, time.perf_counter() - began, fault="" if refused else text[:2000])
    seconds = time.perf_counter() - began
    memory = program.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    alias = memory.alias_size_in_bytes
    copies = count_copies(program, watched)
    fault = ""
    if case and case.fails:
        fault = f"it was compiled, but should be refused with {case.fails!r}"
    elif arguments + memory.output_size_in_bytes - alias + temporaries > CHIPS[chip].memory * 1e9:
        fault = f"it does not fit {CHIPS[chip].memory} GB"
    elif case and temporaries > case.temporaries * arguments:
        fault = f"temporaries are more than {case.temporaries} of the arguments"
    elif case and copies:
        fault = "an input is copied around the kernel"
    elif not case and alias < caches(args[2]) // mesh.size:
        fault = "the caches are not updated in place"
    return Outcome(name, chip, seconds, arguments, temporaries, alias, copies, fault)


def count_copies(program: Any, elements: int) -> int | None:
    """How many copies of so many elements or more; prefetches into vector memory, S(1), are none."""
    try:
        text = program.as_text()
    except Exception as error:
        if "async-update" not in str(error):
            raise
        return None
    found = [
        math.prod(map(int, shape.split(","))) for shape, layout in COPY.findall(text) if "S(1)" not in layout
    ]
    return sum(size >= elements for size in found)


def caches(state: Any) -> int:
    """Bytes of the caches in a state."""
    import jax

    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim == 4)


def work(chip: str, only: str) -> None:
    """In a process that has the settings: a line of JSON with a case's name, then one with its outcome."""
    from kernel_cases import CASES

    devices = topology(chip)
    for name, case in [*((c.name, c) for c in CASES if c.platform == CHIPS[chip].platform), (STEP, None)]:
        if only in name:
            print(json.dumps(name), flush=True)
            print(json.dumps(compile_case(name, case, chip, devices)), flush=True)


def toolkit() -> str | None:
    """Where CUDA's ptxas is: the folder above its bin."""
    found = shutil.which("ptxas")
    places = [os.environ.get("CUDA_HOME"), found and Path(found).resolve().parents[1], "/usr/local/cuda"]
    return next((str(place) for place in places if place and (Path(place) / "bin" / "ptxas").exists()), None)


def missing(platform: str) -> str:
    """Why programs for a platform cannot be compiled here; "" if they can."""
    if platform == "tpu":
        return "" if importlib.util.find_spec("libtpu") else "libtpu is not installed"
    if not importlib.util.find_spec("jax_plugins") or not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        return "jax-cuda13-plugin is not installed"
    return "" if toolkit() else "no ptxas: neither in CUDA_HOME nor in PATH nor in /usr/local/cuda"


def settings(platform: str) -> dict[str, str]:
    """What must stand in the environment before jax is imported. A CPU is the only device."""
    common = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if platform == "gpu":
        return common | {"XLA_FLAGS": f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={toolkit()}"}
    return common | {
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no TPU
    }


def compile_all(chip: str, only: str) -> list[Outcome]:
    """Compile a chip's cases in a process of their own, which a compiler may end, and report each."""
    command = [sys.executable, __file__, "--worker", "--only", only, "--chip", chip]
    env = (
        os.environ | settings(CHIPS[chip].platform) | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    )
    outcomes, current = [], "start"
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=log) as worker:
            for line in worker.stdout or ():
                found = json.loads(line)
                if isinstance(found, str):
                    current = found
                else:
                    outcomes.append(Outcome(*found))
                    report(outcomes[-1])
        if worker.returncode:
            log.seek(0)
            end = f"the compiler ended with {worker.returncode}: {log.read()[-2000:]}"
            outcomes.append(Outcome(current, chip, fault=end))
            report(outcomes[-1])
    return outcomes


def report(outcome: Outcome) -> None:
    copies = "-" if outcome.copies is None else outcome.copies
    sizes = " ".join(f"{size / 1e6:10.1f}" for size in outcome[3:6])
    verdict = "FAILED: " + outcome.fault.splitlines()[0][:200] if outcome.fault else "ok"
    row = f"{outcome.case:24} {outcome.chip:5} {outcome.seconds:7.1f} {sizes} {copies:>7} {verdict}"
    print(row, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", action="append", choices=list(CHIPS), help="default: all")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chips = options.chip or list(CHIPS)
    if options.worker:
        work(*chips, options.only)
        return 0
    print(f"{'case':24} chip  seconds    args MB    temp MB   alias MB  copies")
    reasons = {chip: missing(CHIPS[chip].platform) for chip in chips}
    for chip, reason in reasons.items():
        if reason:
            print(f"{chip}: skipped, {reason}")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        able = [chip for chip in chips if not reasons[chip]]
        outcomes = [
            o for found in pool.map(lambda chip: compile_all(chip, options.only), able) for o in found
        ]
    faults = [outcome for outcome in outcomes if outcome.fault]
    for outcome in faults:
        print(f"\n{outcome.case} on {outcome.chip}: {outcome.fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
