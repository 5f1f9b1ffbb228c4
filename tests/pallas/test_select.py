"""Which kernels a device gets, and plain code with a logged reason where there is none."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import dense
from jspec.errors import JspecError
from jspec.models import layers
from jspec.pallas import select
from jspec.pallas.verify import reference
from jspec.pallas.verify.gumbel_argmax_tpu import gumbel_argmax_tpu
from jspec.serve.target import kernels_of
from tests.pallas import verify_cases as cases

CHIPS = [("tpu", ""), ("gpu", "9.0")]


@pytest.fixture(autouse=True)
def said(caplog):
    select._say.cache_clear()
    caplog.set_level(logging.WARNING, "jspec.pallas.select")
    return caplog


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_gets_its_kernels_and_the_same_each_time(chip):
    kernels = select.of_kind(*chip)
    assert kernels is select.of_kind(*chip) and kernels is not select.PLAIN
    assert kernels.decide is not select.PLAIN.decide
    assert set(kernels.of_model()) == {"attend", "write", "compact", "ring_multiple"}


def test_an_unknown_chip_gets_plain_code_and_says_so(said):
    assert select.of_kind("gpu", "7.5") is select.PLAIN
    assert "no kernels for gpu 7.5" in said.text


@pytest.mark.parametrize("chip", CHIPS)
def test_attention_that_a_kernel_refuses_is_plain_once_with_a_reason(chip, said):
    x = jax.random.normal(jax.random.key(0), (1, 2, 16, 12))  # head_dim 12: no kernel takes them
    given = x[:, :, :2].swapaxes(1, 2), x, x, jnp.array([3]), None, 0.3
    for _ in range(2):
        np.testing.assert_array_equal(select.of_kind(*chip).attend(*given), layers.attend(*given))
    assert said.text.count("attention: plain code instead of the kernel") == 1


@pytest.mark.parametrize("chip", CHIPS)
def test_a_commit_that_a_kernel_refuses_is_plain(chip, said):
    layer = dense.Entry(*jnp.arange(2 * 48, dtype=jnp.float16).reshape(2, 1, 1, 12, 4))
    given = (layer,), jnp.array([[0, 2]]), jnp.array([3])
    got, wanted = select.of_kind(*chip).compact(*given), dense.compact(*given)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert "commit: plain code instead of the kernel" in said.text


def test_other_noise_than_the_kernels_is_not_made_by_them(said):
    gumbel_argmax = select.or_plain(
        "gumbel_argmax", select._threefry(gumbel_argmax_tpu), reference.gumbel_argmax_ref
    )
    rows, x = cases.settings(7), cases.logits(0, 2, 7)
    nothing = jnp.full((cases.BATCH, 1), -1)
    last = reference.LastDraw(
        nothing[:, 0] + 1, cases.row_keys(1), nothing, nothing[:, 0], jnp.zeros(cases.BATCH)
    )
    with jax.threefry_partitionable(False):
        given = rows, x, reference.row_stats_ref(rows, x), last
        np.testing.assert_array_equal(gumbel_argmax(*given)[0], reference.gumbel_argmax_ref(*given)[0])
    assert "jax_threefry_partitionable" in said.text


def test_kernels_by_name():
    assert kernels_of("plain") is select.PLAIN
    with pytest.raises(JspecError, match="kernels = 'fast': choose auto or plain"):
        kernels_of("fast")
