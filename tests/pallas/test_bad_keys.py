"""A key that is NaN, the mark of an entry that is no number: rows that may not see it do not feel it.

The cache stores such an entry with a value of 0 (`jspec.cache.dense.hide_bad_values`), so that all
depends on the mask, in plain code and in kernels alike.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas import compat
from jspec.pallas.attention.gpu import attend_gpu
from jspec.pallas.attention.reference import attend_ref
from jspec.pallas.attention.tpu import attend_tpu
from tests.pallas import attention_cases as cases
from tests.pallas import test_attention_gpu
from tests.pallas.attention_cases import Case, arrays, options, with_bad_keys

pytestmark = pytest.mark.usefixtures("quick_compilation")

TPU = functools.partial(attend_tpu, interpret=compat.tpu_interpreter(cores=1), block=cases.BLOCK)
GPU = functools.partial(attend_gpu, interpret=compat.gpu_interpreter())
TPU_CASES = {case.name: case for case in cases.CASES}
GPU_CASES = {case.name: case for case, _ in test_attention_gpu.CASES}
QUICK = {
    "tree of eight, grouped by four, soft cap": 1,
    "chain of five, two kv heads, grouped by four": 2,
    "a tree in a ring of three blocks, soft cap": 1,
    "chain of five, two kv heads, soft cap": 1,
    "tree of eight, wide heads": 2,
    "tree of eight round a ring of three blocks": 2,
}


def some_cases(attend, known: dict[str, Case]) -> list:
    """Those in which a row sees more than another; each with its number of splits."""
    several = [case for case in known.values() if case.rows > 1]
    return [
        pytest.param(
            functools.partial(attend, splits=QUICK.get(case.name, 1)),
            case,
            marks=() if case.name in QUICK else pytest.mark.slow,
        )
        for case in several
    ]


def check(attend, case: Case) -> None:
    clean = arrays(case, unseen=0.0)
    bad = with_bad_keys(case, clean)
    assert bad.rows.any() and not bad.rows.all()

    def attended(keys):
        given = clean._replace(keys=keys)
        return attend(*given[:5], 0.3, **options(case, given))

    expected, got = (np.asarray(jax.jit(attended)(keys)) for keys in (clean.keys, bad.keys))
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got[~bad.rows].view(bits), expected[~bad.rows].view(bits))
    assert np.all(np.isnan(got[bad.rows].astype(np.float32)))
    assert np.all(np.isfinite(expected.astype(np.float32)))


PLAIN = [pytest.param(attend_ref, case) for name, case in TPU_CASES.items() if name in QUICK]


@pytest.mark.parametrize(
    ("attend", "case"),
    [*PLAIN, *some_cases(TPU, TPU_CASES), *some_cases(GPU, GPU_CASES)],
    ids=lambda x: x.name if isinstance(x, Case) else getattr(x, "func", x).__name__,
)
def test_only_rows_that_see_a_bad_key_are_nan(attend, case):
    check(attend, case)


def test_a_mask_that_is_added_is_seen():
    """The mutant adds -inf to the scores that are hidden: NaN stays NaN."""

    def adding(query, keys, values, length, mask, scale, **options):
        scores = jnp.einsum("bthc,bksc->bths", query, keys) * scale
        seen = cases.seen_slots(length, query.shape[1], keys.shape[2], mask, None, None)
        weights = jax.nn.softmax(scores + jnp.where(seen, 0, -jnp.inf)[:, :, None], axis=-1)
        return jnp.einsum("bths,bksc->bthc", weights, values)

    with pytest.raises(AssertionError):
        check(adding, Case("tree", 4, (0, 5), 16, tree=True))
