"""Partial evaluation of a traced program, as far as its values are known: what `tools.traffic` counts with.

A value is an array, UNKNOWN, or a `Ref`, a piece of memory inside a kernel. An operation
on known values is carried out, any other gives UNKNOWN; branches and loops are taken
where they decide about a copy, and then what decides has to be known. So the counters and
the branches of a kernel run as on the chip while its arrays are never computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.errors import JspecError
from jspec.pallas import compat

FAR = ("any", "hbm", "gmem", "None")
"""Memory spaces off the core, as they print; a jax.Ref that a kernel takes has none."""

COPIES = ("dma_start", "copy_gmem_to_smem", "copy_smem_to_gmem")
READS, WRITES = ("get", "masked_load", "load"), ("swap", "masked_swap", "addupdate")
WAITS = ("dma_wait", "async_prefetch")  # these name far memory and move nothing
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
KERNELS = ("pallas_call", "mpmd_map")
LOOPS = ("cond", "while", "scan")


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Any = _Unknown()


class Ref:
    """Memory inside a kernel.

    ``operand`` names memory that is far. Of what lies on the core small integers are kept.
    ``value``: what it holds from the start and keeps, such as prefetched scalars.
    """

    def __init__(self, aval: Any, operand: str | None = None, value: Any = UNKNOWN):
        small = jnp.issubdtype(aval.dtype, jnp.integer) and math.prod(aval.shape) <= 4096
        self.dtype, self.operand = np.dtype(aval.dtype) if small else aval.dtype, operand
        self.constant = value is not UNKNOWN
        self.cells: np.ndarray | None = None
        if self.constant:
            self.cells = np.asarray(value).astype(object)
        elif small and operand is None and str(aval.memory_space) == "smem":
            self.cells = np.full(aval.shape, UNKNOWN, object)

    def load(self, index: Any) -> Any:
        if self.cells is None or index is None:
            return UNKNOWN
        found = self.cells[index]
        if any(cell is UNKNOWN for cell in np.ravel(found)):
            return UNKNOWN
        return np.asarray(found, self.dtype)

    def store(self, index: Any, value: Any) -> None:
        """Keep a value; without an index, or without a value, what was there is lost."""
        if self.cells is not None and not self.constant:
            self.cells[... if index is None else index] = value if index is not None else UNKNOWN


class PartialEvaluator:
    """Runs jaxprs as far as their values are known.

    ``moved(operand, bytes, written)`` is called for each copy of far memory. ``rules``: more
    primitives, name -> ``(evaluator, equation, values) -> values``. ``axes``
    and ``sizes``: where in the grid of which kernel the body stands, by position or name.
    """

    def __init__(self, moved: Callable[[str, int, bool], None], rules: dict[str, Callable[..., list[Any]]]):
        self.moved = moved
        self.rules = {**_RULES, **rules}
        self.axes: dict[Any, int] = {}
        self.sizes: dict[Any, int] = {}
        self.kernel = ""

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr."""
        return self.evaluate(getattr(jaxpr, "jaxpr", jaxpr), [*getattr(jaxpr, "consts", ()), *args])

    def evaluate(self, body: Any, values: Sequence[Any]) -> list[Any]:
        """The same, with values for its constants too."""
        env = dict(zip([*body.constvars, *body.invars], values, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else env[atom]

        for eqn in body.eqns:
            out = self.step(eqn, [value(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, out, strict=True))
        return [value(v) for v in body.outvars]

    def step(self, eqn: Any, args: list[Any]) -> list[Any]:
        """The results of one equation."""
        name, p = eqn.primitive.name, eqn.params
        if name in self.rules:
            return self.rules[name](self, eqn, args)
        unknown = any(a is UNKNOWN or isinstance(a, Ref) for a in args)
        if name in _SCALARS and not unknown and not eqn.outvars[0].aval.shape:
            return [_scalar(eqn, args)]
        if name in CALLS and (unknown or copies(eqn)):
            return self.run(_inner(eqn)[0], args)
        if any(isinstance(a, Ref) and a.operand for a in args) and name not in WAITS:
            raise JspecError(f"{self.kernel}: what {name!r} moves cannot be counted")
        if copies(eqn):
            raise JspecError(f"the kernels inside {name!r} cannot be counted")
        if unknown or not eqn.outvars:
            return lost(eqn, args)
        try:
            out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(p))
        except NotImplementedError:  # it means something on the chip only
            return lost(eqn, args)
        return list(out) if eqn.primitive.multiple_results else [out]

    def move(self, ref: Any, size: int, written: bool) -> None:
        """Tell of ``size`` entries that are read from memory, or written to it, if it is far."""
        if isinstance(ref, Ref) and ref.operand:
            self.moved(ref.operand, size * ref.dtype.itemsize, written)

    def need(self, value: Any, what: str) -> Any:
        """The value, which has to be known."""
        if value is UNKNOWN:
            raise JspecError(f"{self.kernel}: {what} depends on values that are not known: pass arrays")
        return value


def _scalar(eqn: Any, args: Sequence[Any]) -> Any:
    """What a kernel's counters go through, a hundred times as fast as by jax."""
    values = [np.asarray(a, v.aval.dtype) for a, v in zip(args, eqn.invars, strict=True)]
    with np.errstate(over="ignore"):
        return np.asarray(_SCALARS[eqn.primitive.name](*values), eqn.outvars[0].aval.dtype)


def copies(eqn: Any) -> bool:
    """Whether an equation, or one inside it, moves far memory."""
    if eqn.primitive.name in (*COPIES, *KERNELS):
        return True
    if eqn.primitive.name in (*READS, *WRITES):
        return str(getattr(eqn.invars[0].aval, "memory_space", "")) in FAR
    return any(copies(inner) for jaxpr in _inner(eqn) for inner in jaxpr.eqns)


def lost(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Unknown results; what the equation may have stored is unknown too."""
    if _inner(eqn):
        for ref in args:
            if isinstance(ref, Ref):
                ref.store(None, UNKNOWN)
    return [UNKNOWN] * len(eqn.outvars)


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs of an equation's parameters."""
    listed = [p if isinstance(p, list | tuple) else [p] for p in eqn.params.values()]
    return [p for ps in listed for p in ps if hasattr(p, "eqns")]


def _entries(shape: Sequence[int], transforms: Sequence[Any]) -> int:
    """How many entries are left of a ref after its transforms."""
    size = math.prod(shape)
    for transform in transforms:
        if hasattr(transform, "get_indexer_shape"):  # all others only move entries about
            size = math.prod(transform.get_indexer_shape())
    return size


def _static(eqn: Any, args: Sequence[Any], tree: Any, first: int) -> Any:
    """Unflatten operands with zeros for the values: shapes are static all the same."""
    flat = [
        a if isinstance(a, Ref) else np.zeros(v.aval.shape, getattr(v.aval, "dtype", None))
        for a, v in zip(args[first:], eqn.invars[first:], strict=True)
    ]
    return tree.unflatten(flat[: tree.num_leaves] if hasattr(tree, "num_leaves") else flat)


def _access(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    """A load from a ref, or a store to it, which gives what was there."""
    ref, name = args[0], eqn.primitive.name
    if not isinstance(ref, Ref):
        return lost(eqn, args)
    entry = (eqn.outvars or eqn.invars[1:])[0].aval
    evaluator.move(ref, math.prod(entry.shape), written=name in WRITES)
    index = _index(eqn, args[1 if name in READS else 2 :]) if name in ("get", "swap") else None
    before = ref.load(index)
    if name in WRITES:
        ref.store(index, args[1])
    return [before] * len(eqn.outvars)


def _index(eqn: Any, flat: Sequence[Any]) -> Any:
    """The index of a get or a swap, for numpy; None where it is not known."""
    if any(a is UNKNOWN or isinstance(a, Ref) for a in flat):
        return None
    transforms = eqn.params["tree"].unflatten(flat)
    if not transforms:
        return ...
    if len(transforms) != 1 or not hasattr(transforms[0], "get_indexer_shape"):
        return None
    slices = (
        slice(int(i.start), int(i.start) + i.size * i.stride, i.stride) if hasattr(i, "stride") else i
        for i in transforms[0].indices
    )
    return tuple(i if isinstance(i, slice) else np.asarray(i) for i in slices)


def _dma(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    """TPU: a copy between two memories."""
    source, target, *_ = _static(eqn, args, eqn.params["tree"], 0)
    size = None
    for end, written in ((source, False), (target, True)):
        ref, transforms = (end.ref, end.transforms) if hasattr(end, "transforms") else (end, ())
        aval = next(v.aval for a, v in zip(args, eqn.invars, strict=True) if a is ref)
        size = _entries(aval.shape, transforms) if size is None else size
        evaluator.move(ref, size, written)
    return lost(eqn, args)


def _gpu_copy(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    """Hopper: a copy between global and shared memory."""
    p, into = eqn.params, eqn.primitive.name == "copy_gmem_to_smem"
    if p.get("collective_axes"):
        raise JspecError(f"{evaluator.kernel}: copies that a cluster shares cannot be counted")
    if p.get("has_user_predicate") and not evaluator.need(args[-1], "whether a copy is made"):
        return lost(eqn, args)
    # Operands: source, target, barriers, then the transforms of each.
    barriers = 1 if into and p.get("has_barrier", True) else 0
    before = p["src_transforms_treedef"].num_leaves if not into else 0
    tree = p["src_transforms_treedef" if into else "dst_transforms_treedef"]
    far = 0 if into else 1
    transforms = _static(eqn, args, tree, 2 + barriers + before)
    if not isinstance(args[far], Ref) or not args[far].operand:
        raise JspecError(f"{evaluator.kernel}: a copy from or to memory that is not the kernel's operand")
    evaluator.move(args[far], _entries(eqn.invars[far].aval.shape, transforms), written=not into)
    return lost(eqn, args)


def _run_scoped(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    scratch = [*jaxpr.constvars, *jaxpr.invars][len(args) :]
    return evaluator.evaluate(jaxpr, [*args, *(Ref(v.aval) for v in scratch)])


def _cond(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    branches = eqn.params["branches"]
    if args[0] is UNKNOWN:
        if not copies(eqn):
            return lost(eqn, args)
        evaluator.need(args[0], "a branch around a copy")
    return evaluator.run(branches[int(np.clip(args[0], 0, len(branches) - 1))], args[1:])


def _while(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    p, moves = eqn.params, copies(eqn)
    of_cond, of_body = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = args[of_body:]
    while True:
        (going,) = evaluator.run(p["cond_jaxpr"], [*args[:of_cond], *carry])
        if going is UNKNOWN and not moves:
            return lost(eqn, args)
        if not evaluator.need(going, "the length of a loop around a copy"):
            return carry
        carry = evaluator.run(p["body_jaxpr"], [*args[of_cond:of_body], *carry])


def _scan(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    p = eqn.params
    consts, carried = compat.scan_parts(p)
    if not copies(eqn):
        if any(a is UNKNOWN or isinstance(a, Ref) for a in args):
            return lost(eqn, args)
        return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(p))
    fixed, carry, xs = args[:consts], args[consts : consts + carried], args[consts + carried :]
    steps = range(p["length"])
    for step in reversed(steps) if p["reverse"] else steps:
        each = [x if x is UNKNOWN else x[step] for x in xs]
        carry = evaluator.run(p["jaxpr"], [*fixed, *carry, *each])[:carried]
    return [*carry, *[UNKNOWN] * (len(eqn.outvars) - carried)]


def _axis_index(evaluator: PartialEvaluator, eqn: Any, args: list[Any]) -> list[Any]:
    name, found = eqn.params["axis_name"], 0
    for axis in name if isinstance(name, tuple) else (name,):
        if axis not in evaluator.axes:
            return [UNKNOWN]
        found = found * evaluator.sizes[axis] + evaluator.axes[axis]
    return [np.int32(found)]


_SCALARS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "rem": np.fmod,
    "convert_element_type": np.asarray,
}

_RULES: dict[str, Callable[..., list[Any]]] = {
    **dict.fromkeys((*READS, *WRITES), _access),
    "dma_start": _dma,
    "copy_gmem_to_smem": _gpu_copy,
    "copy_smem_to_gmem": _gpu_copy,
    "run_scoped": _run_scoped,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "program_id": lambda evaluator, eqn, args: [np.int32(evaluator.axes[eqn.params["axis"]])],
    "num_programs": lambda evaluator, eqn, args: [np.int32(evaluator.sizes[eqn.params["axis"]])],
    "axis_index": _axis_index,
}
