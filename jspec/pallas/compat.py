"""What differs between jax 0.10 and 0.12 in Pallas, and the settings that all kernels share.

TPU kernels are `pl.pallas_call` with `tpu_params`; GPU kernels are `gpu_kernel`, Mosaic
GPU, never a bare `pallas_call`, whose meaning on CUDA changed twice. Every kernel takes
``interpret``: False, or `tpu_interpreter()` or `gpu_interpreter()` to run its own program
on a CPU with the chip's memories, copies and semaphores simulated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as _tpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as _gpu_params  # public from 0.12 on
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

INTERPRETS_TRANSPOSED = hasattr(plgpu, "InterpretGPUParams")
"""Whether the GPU interpreter takes ``ref.T`` as an operand of wgmma (from jax 0.12 on)."""


def tpu_params(*semantics: Any, **options: Any) -> pltpu.CompilerParams:
    """Compiler settings of a TPU kernel: what each grid dimension is, "parallel" or "arbitrary"."""
    return pltpu.CompilerParams(dimension_semantics=semantics, **options)


def gpu_kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: Sequence[int],
    grid_names: Sequence[str],
    scratch_types: Any = (),
    interpret: Any = False,
    **options: Any,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel with warpgroup semantics: a program of the grid is one warpgroup or more."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid),
        grid_names=tuple(grid_names),
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret or None,
        **options,
    )


def scan_parts(params: Any) -> tuple[int, int]:
    """How many of a traced scan's operands are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from 0.12 on
    return len(list(consts)), len(list(carry))


def gpu_in_place(
    body: Callable[..., None],
    *,
    grid: Sequence[int],
    grid_names: Sequence[str],
    scratch_types: Sequence[Any] = (),
    interpret: Any = False,
) -> Callable[..., Any]:
    """A `gpu_kernel` without results, which changes those of its arguments that are `jax.new_ref`.

    On jax 0.10 `plgpu.kernel` takes no such arguments; what it is made of does.
    """

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch_types)

    return pl.kernel(
        scoped,
        out_type=(),
        mesh=plgpu.Mesh(grid=tuple(grid), grid_names=tuple(grid_names)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret or False,
    )


def tpu_interpreter(races: bool = True, cores: int = 2, **options: Any) -> pltpu.InterpretParams:
    """Simulate a TPU: uninitialised memory is NaN, a read out of bounds raises, data races are looked for."""
    return pltpu.InterpretParams(detect_races=races, num_cores_or_threads=cores, **options)


def gpu_interpreter(races: bool = True, **options: Any) -> Any:
    """Simulate a Hopper GPU: global and shared memory, barriers and copies; data races are looked for."""
    return _gpu_params.InterpretGPUParams(detect_races=races, **options)


def races_found() -> bool:
    """Whether an interpreted kernel had a data race since `reset_interpreters` (jax 0.12 raises as well)."""
    states = [_tpu_interpreter.races, _gpu_callbacks._races]
    return any(state.races_found for state in states if state is not None)


def reset_interpreters() -> None:
    """Forget what was simulated; needed after an interpreted kernel has raised."""
    pltpu.reset_tpu_interpret_mode_state()
    _gpu_callbacks.reset_gpu_interpret_mode_state()
