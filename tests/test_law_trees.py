"""The law of the whole loop with draft heads: chains and trees, drawn and chosen (see `tests.test_law`)."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jspec import shapes
from jspec.certify import loop as law
from jspec.certify.tiny import VOCAB, tiny_head
from jspec.sampling import verify
from jspec.sampling.drafters import eagle
from jspec.sampling.drafters.medusa import medusa

ROWS = 2000
TREE = shapes.shape([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
DRAFTERS = {
    "chain": lambda head: eagle.fixed(head, shapes.chain(3), vocab_size=VOCAB),
    "tree": lambda head: eagle.fixed(head, TREE, vocab_size=VOCAB),
    "best first": lambda head: eagle.best_first(head, size=6, depth=3, topk=3, vocab_size=VOCAB),
    "medusa": lambda heads: medusa(heads, TREE, vocab_size=VOCAB),
}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("rule", "kind", "drafter"),
    [
        (verify.token, "eagle3", "tree"),  # a vocabulary of its own, so that q is exhausted
        pytest.param(verify.token, "eagle", "chain", marks=slow),
        pytest.param(verify.block, "eagle", "chain", marks=slow),
        pytest.param(verify.token, "eagle", "tree", marks=slow),
        pytest.param(verify.token, "eagle", "best first", marks=slow),
        pytest.param(verify.token, "eagle3", "chain", marks=slow),
        pytest.param(verify.token, "medusa", "medusa", marks=slow),
        pytest.param(verify.coupled, "eagle", "chain", marks=slow),
        pytest.param(verify.coupled, "eagle3", "tree", marks=slow),
        pytest.param(verify.coupled, "eagle", "best first", marks=slow),
        pytest.param(verify.coupled, "medusa", "medusa", marks=slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_loop_writes_the_law(rule, kind, drafter):
    target, params, head, own = tiny_head(kind)
    found = law.chi_square(target, params, DRAFTERS[drafter](head), own, rule, rows=ROWS)
    assert min(found.p_values) > 1e-4, found
    assert found.acceptance_rate > 0.05


def full_siblings(proposal):
    """Later siblings are told with the law that the first of them was drawn from."""
    parent = jnp.array(TREE.parent)
    first = jnp.array([list(TREE.parent).index(above) for above in TREE.parent])
    return proposal._replace(logq=jnp.where(parent[:, None] >= 0, proposal.logq[:, first], proposal.logq))


def hotter(proposal):
    """All laws are told at another temperature."""
    return proposal._replace(logq=jax.nn.log_softmax(proposal.logq * 0.5, axis=-1))


@slow
@pytest.mark.parametrize("change", [full_siblings, hotter])
def test_a_tree_that_lies_is_caught(change):
    target, params, head, own = tiny_head("eagle3")
    drafter = DRAFTERS["tree"](head)

    def propose(params, state, root, context):
        proposal, state = drafter.propose(params, state, root, context)
        return change(proposal), state

    lying = dataclasses.replace(drafter, propose=propose)
    found = law.chi_square(target, params, lying, own, verify.token, rows=2 * ROWS)
    assert min(found.p_values) < 1e-6, found


@slow
@pytest.mark.parametrize(
    ("kind", "drafter"), [("eagle3", "tree"), ("eagle", "best first"), ("medusa", "medusa")]
)
def test_the_coupled_text_is_the_plain_one(kind, drafter):
    target, params, head, own = tiny_head(kind)
    assert law.coupled_differences(target, params, DRAFTERS[drafter](head), own, verify.coupled) == 0
