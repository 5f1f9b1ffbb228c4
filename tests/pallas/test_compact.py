"""Moving an accepted path in place: the kernels against the plain form, and in a whole decoder."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import decode, shapes
from jspec.certify import tiny
from jspec.errors import JspecError
from jspec.models import decoder
from jspec.pallas import compact_gpu, compact_tpu, compat
from jspec.sampling.drafters import eagle
from jspec.sampling.verify import greedy
from tests import oracle

DEVICES = {
    "tpu": functools.partial(compact_tpu.compact, interpret=compat.tpu_interpreter(cores=1)),
    "gpu": functools.partial(compact_gpu.compact, interpret=compat.gpu_interpreter()),
}


def bits(x) -> np.ndarray:
    """NaN equals itself, and 0 is not -0."""
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def random_layers(rng, sizes, batch, heads, channels, dtype):
    """Caches in which some entries are no finite numbers."""

    def buffer(slots):
        x = rng.standard_normal((batch, heads, slots, channels))
        x = np.where(rng.random(x.shape) < 0.1, rng.choice([np.nan, np.inf, -0.0], x.shape), x)
        return jnp.asarray(x, dtype)

    return tuple(kv.Entry(buffer(slots), buffer(slots)) for slots in sizes)


def random_path(rng, paths: int, nodes: int) -> tuple[list[int], int]:
    """Nodes of a tree from its root down, then 0; and how many of them are nodes."""
    kept = int(rng.integers(1, paths + 1))
    chosen = sorted(rng.choice(np.arange(1, nodes), kept - 1, replace=False).tolist())
    return [0, *chosen] + [0] * (paths - kept), kept


def assert_moved(new, old, path, kept, length, wraps):
    """The accepted entries are those of the plain form; slots that the path does not take are as before."""
    wanted = kv.compact(old, path, length, wraps)
    for entry, before, plain, ring in zip(new, old, wanted, wraps, strict=True):
        for got, was, want in zip(map(bits, entry), map(bits, before), map(bits, plain), strict=True):
            for row, start in enumerate(length.tolist()):
                slots = start + np.arange(path.shape[1])
                slots = slots % got.shape[2] if ring else slots
                accepted = slots[: kept[row]]
                np.testing.assert_array_equal(got[row][:, accepted], want[row][:, accepted])
                rest = np.setdiff1d(np.arange(got.shape[2]), slots)
                np.testing.assert_array_equal(got[row][:, rest], was[row][:, rest])


# P, N, K, C, dtype, slots of each layer (rings are those that are no multiple of 64), lengths
CASES = [
    (1, 4, 1, 64, "float32", (64,), (0, 60)),
    (2, 2, 3, 64, "bfloat16", (64, 64), (0, 62, 1)),
    (3, 7, 1, 128, "float32", (64, 40), (57, 6, 36, 0)),
    (4, 64, 1, 128, "bfloat16", (128, 80), (64, 1, 13)),
    (5, 64, 1, 64, "float32", (128, 88), (0, 15, 64)),
    (6, 26, 3, 128, "bfloat16", (64, 48), (38, 7, 14)),
    (7, 10, 1, 64, "bfloat16", (64, 47), (54, 8, 37)),  # an odd ring: on TPU left to the plain code
    (8, 8, 1, 64, "float32", (64, 12), (0, 7, 56)),  # and one that a path fills twice within a tile
    (9, 64, 1, 64, "float32", (128, 72), (16, 64, 63)),
    (9, 32, 3, 64, "bfloat16", (64, 48, 64), (31, 32, 17)),
]


def check(compact, case):
    paths, nodes, heads, channels, dtype, sizes, lengths = case
    rng = np.random.default_rng(100 * paths + nodes)
    wraps = tuple(slots % 64 != 0 for slots in sizes)
    layers = random_layers(rng, sizes, len(lengths), heads, channels, dtype)
    picked = [random_path(rng, paths, nodes) for _ in lengths]
    picked[0] = ([0, *range(nodes - paths + 1, nodes)], paths)  # all, from as far as can be
    if nodes > paths:
        picked[1] = ([0, *range(2, paths + 1)], paths)  # each to its neighbour's slot
    path, kept = jnp.array([p for p, _ in picked]), [n for _, n in picked]
    new = jax.jit(compact, static_argnums=3)(layers, path, jnp.array(lengths), wraps)
    assert_moved(new, layers, path, kept, jnp.array(lengths), wraps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_accepted_entries_move_and_no_others(case, device):
    check(DEVICES[device], case)


def test_two_cores_share_the_rows():
    check(functools.partial(compact_tpu.compact, interpret=compat.tpu_interpreter(cores=2)), CASES[-1])


def test_buffers_pass_in_chunks(monkeypatch):
    """Many, with room for one at a time and two in turn."""
    monkeypatch.setattr(compact_tpu, "VMEM", 60_000)
    check(DEVICES["tpu"], (6, 26, 1, 128, "float32", (64, 48, 64, 64, 48), (38, 7, 14)))


SHAPE = shapes.shape([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0)])
CONFIG = replace(tiny.CONFIG, layers=2, windows=(5, None))
CHUNK = 20  # so that the ring has 24 slots


@functools.cache
def decoded(name: str):
    """Two greedy texts drafted as trees, and the committed entries of the newest slots."""
    compacts = DEVICES | {"plain": kv.compact, "none": lambda layers, *_: layers}
    _, _, head, own = tiny.tiny_head("eagle")
    params = tiny.random_params(decoder.weights(CONFIG), 3, scale=0.5)
    model = decoder.make(CONFIG, taps=head.taps, compact=compacts[name])
    drafter = eagle.fixed(head, SHAPE, vocab_size=tiny.VOCAB)
    loop = decode.make_decoder(model, drafter, greedy, chunk=CHUNK)
    state = loop.init(params, own, oracle.request(model, [[1], [3, 0, 2]], 64, [24, 12]))
    state = loop.run(params, own, state)
    seen = []
    for row, length in enumerate(state.cache.length.tolist()):
        position = np.arange(max(0, length - CONFIG.windows[0] + 1), length)
        seen += [x[row][:, position % x.shape[2]] for x in jax.tree.leaves(state.cache.layers)]
        seen += [x[row][:, :length] for x in state.cache.layers[1]]
    return oracle.texts(state), int(state.stats.accepted.sum()), seen


@pytest.mark.parametrize("device", DEVICES)
def test_a_decoder_with_the_kernel_writes_the_same_text_and_cache(device):
    text, accepted, seen = decoded(device)
    wanted, also_accepted, plain = decoded("plain")
    assert text == wanted and accepted == also_accepted > 5
    for got, want in zip(seen, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_without_the_move_the_cache_is_another():
    """Mutant: the accepted entries stay where they were written."""
    pairs = zip(decoded("none")[2], decoded("plain")[2], strict=True)
    assert not all(a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def test_the_compiled_call_has_no_plan_for_one_node():
    """A root alone stays: nothing is called."""
    layers = random_layers(np.random.default_rng(0), (64,), 1, 1, 64, "float32")
    for compact in DEVICES.values():
        assert compact(layers, jnp.zeros((1, 1), int), jnp.array([3])) is layers


REFUSED = [
    ("int8", (1, 64), 3, "caches of float32 or bfloat16, not int8"),
    ("float32", (33, 128), 64, "bytes of VMEM for a buffer|bytes of shared memory"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_what_does_not_fit_is_refused(case, device):
    dtype, (heads, channels), paths, message = case
    buffer = jnp.zeros((1, heads, 64, channels), dtype)
    with pytest.raises(JspecError, match=message):
        DEVICES[device]((kv.Entry(buffer, buffer),), jnp.zeros((1, paths), int), jnp.array([0]))


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_two_shapes_are_refused(device):
    wide, narrow = (jnp.zeros((1, 1, 64, c)) for c in (128, 64))
    with pytest.raises(JspecError, match=r"not float32\[1, 1, 64, 64\] beside float32\[1, 1, 64, 128\]"):
        DEVICES[device](
            (kv.Entry(wide, wide), kv.Entry(narrow, narrow)), jnp.zeros((1, 3), int), jnp.array([0])
        )


def test_entries_that_no_copy_takes_are_refused():
    for shape in [(1, 1, 64, 6), (1, 257, 64, 64), (1, 1, 64, 260)]:
        buffer = jnp.zeros(shape)
        with pytest.raises(JspecError, match="up to 256 heads and channels"):
            compact_gpu.compact((kv.Entry(buffer, buffer),), jnp.zeros((1, 3), int), jnp.array([0]))
