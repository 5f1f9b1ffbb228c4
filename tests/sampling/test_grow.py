"""Growth as a compiled program: what it must not contain."""

import jax
import jax.numpy as jnp
import pytest

from jspec import tree
from jspec.sampling import grow, keys, policy
from jspec.types import Context, History

VOCAB, SHAPE = 512, tree.likeliest(12, 3, 4)


def program(drawn: bool) -> str:
    """A static tree on a table: row t of the logits follows token t."""
    history = History(jnp.zeros((1, 8), jnp.int32), jnp.array([3]), jnp.array([3]), jnp.full((1, 1), -1))

    def grown(table, root, key):
        writer = grow.Writer(lambda table, tokens, above, layout: (table[tokens], table), None, VOCAB)
        context = Context(
            jnp.array([2]), policy.make(1, VOCAB, temperature=1.0), history, key, jnp.zeros((1,), jnp.int32)
        )
        return grow.fixed(SHAPE, writer, grow.Start(table[root], table), root, context, drawn)

    table = jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))
    return jax.jit(grown).lower(table, jnp.array([1]), keys.row_keys([1], 1)).compile().as_text()


@pytest.mark.parametrize("drawn", [False, True])
def test_no_vocabulary_is_sorted(drawn):
    """On CPU a sort of each level's logits took as long as all model passes."""
    assert " sort(" not in program(drawn) and "TopK" in program(drawn)


def test_a_top_k_that_may_be_merged_is_sorted(monkeypatch):
    """The mutant: without its barrier. If this fails, XLA has learned better and the barrier may go."""
    monkeypatch.setattr(grow, "_top", jax.lax.top_k)
    assert " sort(" in program(drawn=True)
