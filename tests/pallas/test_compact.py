"""Moving an accepted path in place: the kernels against the plain form, and in a whole decoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import shapes
from jspec.errors import JspecError
from jspec.pallas import compact_gpu, compact_tpu, compat

DEVICES = {
    "tpu": functools.partial(compact_tpu.compact, interpret=compat.tpu_interpreter()),
    "gpu": functools.partial(compact_gpu.compact, interpret=compat.gpu_interpreter()),
}


def bits(x) -> np.ndarray:
    """So that NaN equals itself, and 0 is not -0."""
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def random_layers(rng, sizes, batch, heads, channels, dtype):
    """Caches in which some entries are no finite numbers."""

    def buffer(slots):
        x = rng.standard_normal((batch, heads, slots, channels))
        x = np.where(rng.random(x.shape) < 0.1, rng.choice([np.nan, np.inf, -0.0], x.shape), x)
        return jnp.asarray(x, dtype)

    return tuple(kv.Entry(buffer(slots), buffer(slots)) for slots in sizes)


def random_path(rng, paths: int, nodes: int) -> tuple[list[int], int]:
    """Nodes of a tree from its root down, then 0; and how many are kept."""
    kept = int(rng.integers(1, paths + 1))
    chosen = sorted(rng.choice(np.arange(1, nodes), kept - 1, replace=False).tolist())
    return [0, *chosen] + [0] * (paths - kept), kept


def assert_moved(new, old, path, kept, length, wraps):
    """As in the plain form, and nothing else has changed."""
    wanted = kv.compact(old, path, length, wraps)
    for entry, before, plain in zip(new, old, wanted, strict=True):
        for x, y, z in zip(map(bits, entry), map(bits, before), map(bits, plain), strict=True):
            for row, start in enumerate(length.tolist()):
                slots = start + np.arange(path.shape[1])
                # Slots beyond the end are never in use.
                slots = slots % x.shape[2]
                accepted = slots[: kept[row]]
                np.testing.assert_array_equal(x[row][:, accepted], z[row][:, accepted])
                rest = np.setdiff1d(np.arange(x.shape[2]), slots)
                np.testing.assert_array_equal(x[row][:, rest], y[row][:, rest])


# paths, nodes, heads, channels, dtype, slots of each layer (a ring where it is no multiple of 64)
CASES = [
    (1, 4, 1, 64, "float32", (64,)),
    (2, 2, 3, 64, "bfloat16", (64, 64)),
    (3, 7, 1, 128, "float32", (64, 40)),
    (5, 64, 1, 64, "bfloat16", (128, 88, 128, 88)),
    (6, 26, 3, 128, "float32", (64, 37)),
    (9, 64, 3, 64, "float32", (128, 71)),
    (9, 32, 1, 128, "bfloat16", (64, 48, 64)),
    (9, 12, 1, 64, "bfloat16", (64, 20)),  # the ring is left to the plain code on TPU
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_accepted_entries_move_and_no_other(case, device):
    paths, nodes, heads, channels, dtype, sizes = case
    rng = np.random.default_rng(paths * nodes)
    wraps = [slots % 64 != 0 for slots in sizes]
    last = min(slots for slots, ring in zip(sizes, wraps, strict=True) if not ring) - nodes
    lengths = [0, 1, 7, 8, 15, 16, 17, 31, last - 1, last]
    length = jnp.array(sorted({n for n in lengths if 0 <= n <= last}))
    layers = random_layers(rng, sizes, len(length), heads, channels, dtype)
    picked = [random_path(rng, paths, nodes) for _ in length]
    picked[-1] = ([0, *range(nodes - paths + 1, nodes)], paths)  # as far back as can be
    picked[0] = ([0, *range(1 + (nodes > paths), paths + (nodes > paths))], paths)  # each to its neighbour
    path, kept = jnp.array([p for p, _ in picked]), [n for _, n in picked]
    new = jax.jit(DEVICES[device], static_argnums=3)(layers, path, length, tuple(wraps))
    assert_moved(new, layers, path, kept, length, wraps)
