"""Moving an accepted path in place: the kernels against the plain form, and in a whole decoder."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, tree
from jspec.cache import dense
from jspec.certify import tiny
from jspec.errors import JspecError
from jspec.models import decoder
from jspec.pallas import compat, select
from jspec.pallas.commit import tpu
from jspec.pallas.commit.gpu import compact_gpu
from jspec.pallas.commit.tpu import compact_tpu
from jspec.sampling.verifiers import greedy
from jspec.types import Drafter, Proposal
from tests import oracle
from tests.pallas.test_gates import lower

DEVICES = {
    "tpu": functools.partial(compact_tpu, interpret=compat.tpu_interpreter(cores=1)),
    "gpu": functools.partial(compact_gpu, interpret=compat.gpu_interpreter()),
}


def bits(x) -> np.ndarray:
    """NaN equals itself, and 0 is not -0."""
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def random_layers(rng, sizes, batch, heads, head_dim, dtype):
    """Caches in which some entries are no finite numbers."""

    def buffer(slots):
        x = rng.standard_normal((batch, heads, slots, head_dim))
        x = np.where(rng.random(x.shape) < 0.1, rng.choice([np.nan, np.inf, -0.0], x.shape), x)
        return jnp.asarray(x, dtype)

    return tuple(dense.Entry(buffer(slots), buffer(slots)) for slots in sizes)


def random_path(rng, paths: int, nodes: int) -> tuple[list[int], int]:
    """Nodes of a tree from its root down, then 0; and how many of them are nodes."""
    kept = int(rng.integers(1, paths + 1))
    chosen = sorted(rng.choice(np.arange(1, nodes), kept - 1, replace=False).tolist())
    return [0, *chosen] + [0] * (paths - kept), kept


def assert_moved(new, old, path, kept, length, wraps):
    """The accepted entries are those of the plain form; slots that the path does not take are as before."""
    wanted = dense.compact(old, path, length, wraps)
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
    (2, 2, 3, 64, "bfloat16", (64,), (0, 62, 1)),
    (3, 7, 1, 128, "float32", (64, 40), (57, 6, 36, 0)),
    (5, 64, 1, 128, "bfloat16", (128, 80), (64, 1, 13)),
    (6, 26, 1, 64, "bfloat16", (48, 64), (38, 7, 14)),
    (12, 14, 1, 64, "float32", (64, 15, 16), (46, 7, 0)),  # on TPU these rings are left to the plain code
    (9, 64, 3, 64, "float32", (128, 72), (16, 64, 63)),
]


def check(compact, case):
    paths, nodes, heads, head_dim, dtype, sizes, lengths = case
    rng = np.random.default_rng(100 * paths + nodes)
    wraps = tuple(slots % 64 != 0 for slots in sizes)
    layers = random_layers(rng, sizes, len(lengths), heads, head_dim, dtype)
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
    check(functools.partial(compact_tpu, interpret=compat.tpu_interpreter(cores=2)), CASES[1])


def test_buffers_pass_in_chunks(monkeypatch):
    """Six, with room for two at a time."""
    monkeypatch.setattr(tpu, "VMEM", 50_000)
    check(DEVICES["tpu"], (3, 26, 1, 128, "float32", (64, 48, 64), (38, 7)))


CONFIG = replace(tiny.CONFIG, layers=2, windows=(5, None))
CHUNK = 20  # so that the ring has 24 slots


def every_pair() -> Drafter:
    """A tree of all tokens, each followed by all: two are accepted, and almost always they move."""
    first = jnp.arange(tiny.VOCAB)
    tokens = jnp.concatenate([first[:1], first, jnp.tile(first, tiny.VOCAB)])
    parent = jnp.concatenate([jnp.array([-1]), jnp.zeros_like(first), 1 + jnp.repeat(first, tiny.VOCAB)])

    def propose(params, state, root, context):
        drafts = jnp.tile(tokens, (len(root), 1)).at[:, 0].set(root)
        layout = tree.from_parents(jnp.tile(parent, (len(root), 1)))
        return Proposal(drafts, layout, jnp.full((len(root),), len(tokens))), ()

    def nothing(*_):
        return ()

    return Drafter(nothing, nothing, propose, nodes=len(tokens), depth=2, growth="tree")


def decoded(compact):
    """Two greedy texts in three tokens a round, and the committed entries that a later pass would see."""
    params = tiny.random_params(decoder.weights(CONFIG), 3, scale=0.5)
    loop = decode.make_decoder(
        decoder.make(CONFIG, compact=compact), every_pair(), greedy, chunk=CHUNK, skip_empty_rounds=False
    )
    state = loop.init(params, None, oracle.request(tiny.tiny(0)[0], [[1], [3, 0, 2]], 64, [24, 13]))
    state = loop.run(params, None, state)
    assert state.stats.rounds.tolist() == [8, 4]
    seen = []
    for entry, window in zip(state.cache.layers, CONFIG.windows, strict=True):
        for row, length in enumerate(state.cache.length.tolist()):
            position = np.arange(max(0, length + 1 - window) if window else 0, length)
            seen += [x[row][:, position % x.shape[2]] for x in entry]
    return oracle.texts(state), seen


def test_a_decoder_with_the_kernel_writes_the_same_text_and_cache():
    (text, seen), (wanted, plain) = decoded(DEVICES["tpu"]), decoded(dense.compact)
    assert text == wanted
    for got, want in zip(seen, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_root_alone_stays():
    layers = random_layers(np.random.default_rng(0), (64,), 1, 1, 64, "float32")
    for compact in DEVICES.values():
        assert compact(layers, jnp.zeros((1, 1), int), jnp.array([3])) is layers


REFUSED = [
    ("int8", (1, 64), 3, "caches of float32 or bfloat16, not int8"),
    ("float32", (33, 128), 33, "bytes of VMEM for a buffer|bytes of shared memory"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_what_does_not_fit_is_refused(case, device):
    dtype, (heads, head_dim), paths, message = case
    buffer = jnp.zeros((1, heads, 64, head_dim), dtype)
    with pytest.raises(JspecError, match=message):
        DEVICES[device]((dense.Entry(buffer, buffer),), jnp.zeros((1, paths), int), jnp.array([0]))


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_two_shapes_are_refused(device):
    wide, narrow = (jnp.zeros((1, 1, 64, c)) for c in (128, 64))
    with pytest.raises(JspecError, match=r"not float32\[1, 1, 64, 64\] beside float32\[1, 1, 64, 128\]"):
        DEVICES[device](
            (dense.Entry(wide, wide), dense.Entry(narrow, narrow)),
            jnp.zeros((1, 3), int),
            jnp.array([0]),
        )


def test_entries_that_no_copy_takes_are_refused():
    for shape in [(1, 1, 64, 6), (1, 1, 64, 36), (1, 257, 64, 64), (1, 1, 64, 260)]:
        buffer = jnp.zeros(shape)
        with pytest.raises(JspecError, match="up to 256 heads and head_dim up to 256"):
            compact_gpu((dense.Entry(buffer, buffer),), jnp.zeros((1, 3), int), jnp.array([0]))


def test_a_path_of_more_nodes_than_barriers_is_plain_code(caplog):
    """Mosaic GPU has 32 barriers a group, one for each entry that moves; the root stays."""
    buffer = jax.ShapeDtypeStruct((1, 1, 128, 64), jnp.bfloat16)
    layer, length = dense.Entry(buffer, buffer), jax.ShapeDtypeStruct((1,), jnp.int32)
    longest, longer = (jax.ShapeDtypeStruct((1, nodes), jnp.int32) for nodes in (33, 34))
    assert "mosaic_gpu" in lower(compact_gpu, (layer,), longest, length, platform="cuda")
    with pytest.raises(JspecError, match="paths of up to 33 nodes, the root included, not 34"):
        jax.eval_shape(compact_gpu, (layer,), longer, length)
    compact = select.of_kind("gpu", "9.0").compact
    assert "mosaic_gpu" not in lower(compact, (layer,), longer, length, platform="cuda")
    assert (
        "commit: plain code instead of the kernel: the commit kernel takes paths of up to 33" in caplog.text
    )
