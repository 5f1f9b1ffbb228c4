"""Which feature goes with which token: heads that copy the target draft its text, or nothing at all.

Lossless verifiers hide a shift that is off by one: it only makes drafts useless.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.sampling.drafters import eagle_static
from jspec.sampling.drafters.medusa import medusa
from jspec.types import Context, Drafter, Emitted
from tests.sampling.drafters import rigged
from tests.sampling.drafters.cases import BUSHY, chain, dynamic

NOTHING = Context(*(None,) * 5)


class Late(NamedTuple):
    inner: Any
    token: jax.Array
    feature: jax.Array


def off_by_one(drafter: Drafter, what: str) -> Drafter:
    """Every token, or every feature, is taken in with the next one's companion."""

    def init(params, batch, slots, scratch):
        feature = jnp.zeros((batch, 1, rigged.WIDTH * 2))
        return Late(drafter.init(params, batch, slots, scratch), jnp.zeros((batch, 1), jnp.int32), feature)

    def absorb(params, state, emitted):
        width = emitted.features.shape[2]
        tokens = jnp.concatenate([state.token, emitted.tokens], axis=1)
        features = jnp.concatenate([state.feature[..., :width], emitted.features], axis=1)
        changed = {"token": dict(tokens=tokens[:, :-1]), "feature": dict(features=features[:, :-1])}[what]
        last = jnp.take_along_axis(features, emitted.count[:, None, None], axis=1)
        last = jnp.pad(last, ((0, 0), (0, 0), (0, rigged.WIDTH * 2 - width)))
        inner = drafter.absorb(params, state.inner, emitted._replace(**changed))
        return Late(inner, jnp.take_along_axis(tokens, emitted.count[:, None], axis=1), last)

    def propose(params, state, root, context):
        return drafter.propose(params, state.inner, root, context)

    return Drafter(init, absorb, propose, drafter.nodes, drafter.depth, drafter.growth)


@functools.cache
def features_of(feature_layers) -> jax.Array:
    """The target's on the text, each beside the token that it predicts; zeros beside the first."""
    model, params = rigged.target(feature_layers)
    forward = jax.jit(
        lambda params: model.forward(params, model.init_cache(1, 16), TEXT, tree.chain(1, 12))[1]
    )
    return jnp.pad(forward(params), ((0, 0), (1, 0), (0, 0)))


TEXT = jnp.arange(12, dtype=jnp.int32)[None] % rigged.VOCAB


def drafted(drafter, params, feature_layers) -> float:
    """How much of the text, to the depth of its draft, a drafter finds after texts of several lengths."""
    features = features_of(feature_layers)

    @jax.jit
    def after(params, state, start, count):
        """One token more, or two."""
        tokens = jax.lax.dynamic_slice_in_dim(TEXT, start, 2, axis=1)
        with_them = jax.lax.dynamic_slice_in_dim(features, start, 2, axis=1)
        state = drafter.absorb(params, state, Emitted(tokens, count[None], with_them))
        return drafter.propose(params, state, tokens[0, count - 1][None], NOTHING)[0], state

    state, found = drafter.init(params, 1, 32, 8), 0
    for start, count in ((0, 1), (1, 2), (3, 1), (4, 2)):
        proposal, state = after(params, state, start, jnp.array(count))
        if start == 0:  # no feature yet
            assert proposal.count.tolist() == [1]
            continue
        assert proposal.count.tolist() == [drafter.nodes]
        found += depth_of(proposal, (start + count - 1) % rigged.VOCAB)
    return found / (3 * drafter.depth)


def depth_of(proposal, root: int) -> int:
    """How far the text root, root + 1, ... goes down the tree."""
    tokens, parent = np.asarray(proposal.tokens[0]), np.asarray(proposal.tree.parent[0])
    assert tokens[0] == root
    at = depth = 0
    while True:
        wanted = (root + depth + 1) % rigged.VOCAB
        below = [n for n in range(1, len(tokens)) if parent[n] == at and tokens[n] == wanted]
        if not below:
            return depth
        at, depth = below[0], depth + 1


GROWTHS = {
    "chain": lambda head: chain(head, rigged.VOCAB, drawn=False),
    "tree": lambda head: eagle_static(head, BUSHY, vocab_size=rigged.VOCAB, drawn=False),
    "best first": lambda head: dynamic(head, rigged.VOCAB),
    "medusa": lambda heads: medusa(heads, BUSHY, vocab_size=rigged.VOCAB),
}


@pytest.mark.parametrize(
    ("kind", "by", "growth"),
    [
        ("eagle", "token", "chain"),
        ("eagle", "feature", "best first"),
        ("eagle3", "token", "tree"),
        ("eagle3", "feature", "chain"),
        ("medusa", "feature", "medusa"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("eagle", "token", "tree"), ("eagle", "token", "best first"), ("eagle", "feature", "chain"),
            ("eagle", "feature", "tree"), ("eagle3", "token", "chain"), ("eagle3", "token", "best first"),
            ("eagle3", "feature", "tree"), ("eagle3", "feature", "best first"))),
    ],
)  # fmt: skip
def test_a_head_that_copies_the_target_drafts_its_text(kind, by, growth):
    """All of it; and with one of the two late, nothing."""
    head, params = rigged.copying(kind, by)
    drafter = GROWTHS[growth](head)
    assert drafted(drafter, params, head.feature_layers) == 1.0
    late = drafted(off_by_one(drafter, by), params, head.feature_layers)
    # Of five tokens a tree has the right one among its three children now and then.
    assert late == 0.0 if growth == "chain" else late < 0.5
