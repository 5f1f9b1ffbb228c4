"""Bytes that kernels move between a chip's memory and its cores, counted from their programs.

The compiler's own count leaves kernels out, so this one runs them. The function is
traced and evaluated as far as its values are known (`tools.partial_eval`), and each kernel met
on the way is walked through its grid:

* a block of an input is fetched at the first step and whenever its index differs from the
  step before; a block of an output is written before its index changes and at the end.
  Index maps see the scalars that were prefetched for them;
* copies that the body starts itself (TPU: `make_async_copy`; Hopper: to and from shared
  memory, those of `emit_pipeline` too), and what it loads and stores in global memory
  directly, are summed.

A block that reaches over the edge counts whole, prefetched scalars count nothing, and what
two programs of a GPU both fetch counts twice, though the second may find it in a cache.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tools.partial_eval import FAR, UNKNOWN, PartialEvaluator, Ref, copies, lost


class Traffic(NamedTuple):
    """Bytes, all together and of each operand of each kernel as (read, written)."""

    read: int
    written: int
    parts: dict[str, tuple[int, int]]

    @property
    def total(self) -> int:
        return self.read + self.written


def count(function: Callable[..., Any], *args: Any, cores: int = 1, results: bool = False) -> Traffic:
    """Count what the kernels that ``function(*args)`` calls move.

    An argument, or a leaf of one, may be a `jax.ShapeDtypeStruct` where no index map, loop
    or branch around a copy depends on it. ``results``: what TPU kernels compute from known
    values is known too (they run as plain code); else it is not. ``cores``: how many a
    parallel grid is split over; each fetches its own first blocks.
    Raises `JspecError`, naming the kernel, where copies depend on what is not known.

    >>> from jax.experimental import pallas as pl
    >>> def double(x_ref, o_ref):
    ...     o_ref[...] = 2 * x_ref[...]
    >>> rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    >>> x = jax.ShapeDtypeStruct((32, 128), jnp.float32)
    >>> kernel = pl.pallas_call(double, out_shape=x, grid=(4,), in_specs=[rows], out_specs=rows)
    >>> count(kernel, x)[:2]
    (16384, 16384)
    """
    moved: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    calls: collections.Counter[str] = collections.Counter()

    def move(operand: str, size: int, written: bool) -> None:
        moved[operand][written] += size

    def kernel_rule(walk: Callable[..., None]) -> Callable[..., list[Any]]:
        def kernel(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
            evaluator.kernel = eqn.params.get("name") or _name(eqn)
            calls[evaluator.kernel] += 1
            if calls[evaluator.kernel] > 1:
                evaluator.kernel += f" #{calls[evaluator.kernel]}"
            walk(evaluator, eqn, args, cores)
            known = not any(a is UNKNOWN or isinstance(a, Ref) for a in args)
            if results and known and "interpret" in eqn.params and walk is _blocks:
                params = eqn.primitive.get_bind_params(eqn.params | {"interpret": True})
                return list(jax.jit(lambda *args: eqn.primitive.bind(*args, **params))(*args))
            return lost(eqn, args)

        return kernel

    rules = {"pallas_call": kernel_rule(_blocks), "mpmd_map": kernel_rule(_programs)}
    evaluator = PartialEvaluator(move, rules)
    leaves = jax.tree.leaves(args)
    values = [UNKNOWN if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    evaluator.run(jax.make_jaxpr(function)(*args), values)
    parts = {name: (read, written) for name, (read, written) in moved.items()}
    return Traffic(sum(read for read, _ in parts.values()), sum(out for _, out in parts.values()), parts)


def _name(eqn: Any) -> str:
    jaxpr = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["jaxprs"][0]
    return jaxpr.debug_info.func_name


def _operands(evaluator: PartialEvaluator, jaxpr: Any) -> list[str]:
    """What the operands of a body are called in its source."""
    names = jaxpr.debug_info.arg_names or ()
    numbered = [f"operand {index}" for index in range(len(jaxpr.invars))]
    return [f"{evaluator.kernel}: {name}" for name in [*names, *numbered[len(names) :]]]


def _blocks(evaluator: PartialEvaluator, eqn: Any, args: list[Any], cores: int) -> None:
    """A TPU kernel: its blocks, then the copies of its body."""
    mapping, body = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    dynamic, indexed = mapping.num_dynamic_grid_bounds, mapping.num_index_operands
    bounds, scalars = iter(args[:dynamic]), args[dynamic : dynamic + indexed]
    grid = [
        int(size if isinstance(size, int) else evaluator.need(next(bounds), "the size of the grid"))
        for size in mapping.grid
    ]
    runs = list(_runs(grid, eqn.params["compiler_params"], cores))
    operands = args[dynamic + indexed :]
    names, far = _operands(evaluator, body)[indexed:], [_is_far(b) for b in mapping.block_mappings]
    for index, block in enumerate(mapping.block_mappings):
        if not far[index]:
            entry = block.transformed_block_aval
            size = math.prod(entry.shape) * entry.dtype.itemsize
            times = sum(_changes(evaluator, block, run, scalars) for run in runs)
            evaluator.moved(names[index], size * times, index >= mapping.num_inputs)
    if not any(map(copies, body.eqns)):
        return
    for run in runs:
        refs = [Ref(v.aval, value=value) for v, value in zip(body.invars, scalars, strict=False)]
        for index, block in enumerate(mapping.block_mappings):
            held = _integers(operands[index]) if index < len(operands) and not far[index] else UNKNOWN
            held = held if block.has_trivial_window() else UNKNOWN
            refs.append(Ref(body.invars[indexed + index].aval, names[index] if far[index] else None, held))
        refs += [Ref(v.aval) for v in body.invars[len(refs) :]]
        for point in run.tolist():
            _at(evaluator, dict(enumerate(point)), dict(enumerate(grid)), body, refs)


def _is_far(block: Any) -> bool:
    return str(block.transformed_block_aval.memory_space or "default") in FAR


def _runs(grid: Sequence[int], params: Any, cores: int) -> Iterator[np.ndarray]:
    """The grid points that each core visits, in order: [steps, dimensions]."""
    points = np.indices(grid).reshape(len(grid), -1).T if grid else np.zeros((1, 0), np.int64)
    semantics = getattr(params, "dimension_semantics", None) or ()
    parallel = [n for n, kind in zip(grid, semantics, strict=False) if str(kind).lower().endswith("parallel")]
    share = -(-math.prod(parallel) // cores) * (len(points) // max(math.prod(parallel), 1))
    for first in range(0, len(points), max(share, 1)):
        yield points[first : first + share]


def _changes(evaluator: PartialEvaluator, block: Any, points: np.ndarray, scalars: Sequence[Any]) -> int:
    """How often a block's index differs from the step before, the first step included."""
    index_map = block.index_map_jaxpr.jaxpr
    used = {id(v) for inner in index_map.eqns for v in inner.invars}
    known = []
    for variable, scalar in zip(index_map.invars[points.shape[1] :], scalars, strict=True):
        if scalar is UNKNOWN and id(variable) not in used:
            scalar = jnp.zeros(variable.aval.shape, variable.aval.dtype)
        known.append(evaluator.need(scalar, f"the index map of {block.origin}"))

    def start(point):
        found = block.compute_start_indices_interpret(tuple(point), *known)
        return jnp.stack([jnp.asarray(i, jnp.int32) for i in (0, *found)])

    starts = np.asarray(jax.jit(jax.vmap(start))(jnp.asarray(points, jnp.int32)))
    return int(np.any(starts[1:] != starts[:-1], axis=1).sum()) + min(len(points), 1)


def _programs(evaluator: PartialEvaluator, eqn: Any, args: list[Any], cores: int) -> None:
    """A Mosaic GPU kernel: the body of every program and of every warpgroup in it."""
    for body, mesh in zip(eqn.params["jaxprs"], eqn.params["meshes"], strict=True):
        names = _operands(evaluator, body)
        shape = dict(mesh.shape)
        for point in itertools.product(*map(range, shape.values())):
            refs = [
                Ref(v.aval, name if str(v.aval.memory_space) in FAR else None, _integers(value))
                for v, name, value in zip(body.invars, names, [*args, *[UNKNOWN] * len(names)], strict=False)
            ]
            _at(evaluator, dict(zip(shape, point, strict=True)), shape, body, refs)


def _integers(value: Any) -> Any:
    """An operand that loops and branches may depend on."""
    small = (
        isinstance(value, np.ndarray | jax.Array)
        and value.size <= 4096
        and jnp.issubdtype(value.dtype, jnp.integer)
    )
    return value if small else UNKNOWN


def _at(evaluator: PartialEvaluator, axes: dict, sizes: dict, body: Any, refs: list[Ref]) -> None:
    """Run a kernel's body at one point of its grid."""
    outside = evaluator.axes, evaluator.sizes
    evaluator.axes, evaluator.sizes = axes, sizes
    evaluator.run(body, refs)
    evaluator.axes, evaluator.sizes = outside
