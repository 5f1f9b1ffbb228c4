"""Trees, chains and whole texts against the original code of EAGLE-1, 2, 3 and Medusa."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, tree
from jspec.sampling.drafters import eagle_dynamic, eagle_static
from jspec.sampling.drafters.medusa import medusa
from jspec.sampling.verifiers import greedy
from jspec.types import Context, Emitted
from jspec.weights.heads import load_head
from tests import oracle
from tests.models.test_eagle import GOLDEN, assert_close, features, load, target

SLOTS = 96
NOTHING = Context(*(None,) * 5)


def saved(folder: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / folder / "rounds.npz") as arrays:
        return dict(arrays)


def parents(mask: np.ndarray) -> np.ndarray:
    """The nearest node that each sees besides itself; -1 for the root."""
    return np.array([max(np.flatnonzero(row[:i]), default=-1) for i, row in enumerate(mask)])


def proposed(drafter, params, prompt, tapped):
    """What it proposes after a prompt whose last token is the root; it may look at nothing else."""
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    count = jnp.array([tokens.shape[1] - 1])

    @jax.jit
    def after(params, tokens, tapped):
        first = Emitted(tokens[:, :1], count * 0 + 1, jnp.zeros_like(tapped[:, :1]))
        state = drafter.absorb(params, drafter.init(params, 1, SLOTS, 32), first)
        state = drafter.absorb(params, state, Emitted(tokens[:, 1:], count, tapped))
        return drafter.propose(params, state, tokens[:, -1], NOTHING)[0]

    return after(params, tokens, tapped)


@pytest.mark.parametrize(
    "case",
    [
        "eagle1/head_bias",
        "eagle1/head_nobias",
        "eagle3/head",
        *(pytest.param(f"eagle3/head_{name}", marks=pytest.mark.slow)
          for name in ("full_vocab", "target_hidden_size", "speculators_nbr_false", "speculators_nbr_true",
                       "speculators_normbeforefc_nbr_true",
                       "speculators_qwen3_fcnorm_normoutput_2layer")),
    ],
)  # fmt: skip
def test_a_chain_is_the_originals(case):
    loaded, _, golden, tapped = load(case)
    drafter = eagle_static(loaded.head, tree.chain_shape(4), vocab_size=199, drawn=False)
    prompt = np.append(golden["prompt"], golden["tokens"][-1])
    made = proposed(drafter, loaded.params, prompt, tapped)
    assert made.tokens[0, 1:].tolist() == golden["drafts"].tolist()
    assert made.count.tolist() == [5] and made.tree.mask is None and made.logq is None


def test_the_big_tree_is_eagle_2s():
    base, golden = target("eagle1"), saved("eagle2")
    loaded = load_head(GOLDEN / "eagle1/head_bias", base)
    total, depth, topk = golden["big_params"].tolist()
    drafter = eagle_dynamic(loaded.head, size=total - 1, depth=depth + 1, topk=topk, vocab_size=199)
    tapped = features("eagle1", loaded.head.feature_layers, tuple(golden["prompt"][:-1].tolist()))
    made = proposed(drafter, loaded.params, golden["prompt"], tapped)
    np.testing.assert_array_equal(made.tokens[0], golden["big_tokens"])
    np.testing.assert_array_equal(made.tree.parent[0], golden["big_parents"])
    np.testing.assert_array_equal(made.tree.mask[0], golden["big_mask"])
    np.testing.assert_array_equal(made.tree.depth[0], golden["big_depth"])


@functools.cache
def trace(head: str, folders: tuple[str, ...]):
    """The loop beside the original's text: its golden arrays, and what each round began with and proposed."""
    method, golden = head.split("/")[0], [saved(folder) for folder in folders]
    base = target("eagle1" if method == "medusa" else method)
    loaded = load_head(GOLDEN / head, base)
    if method == "medusa":
        drafter = medusa(loaded.head, MEDUSA, vocab_size=199)
    else:
        total, depth, topk = golden[0]["params"].tolist()
        drafter = eagle_dynamic(loaded.head, size=total - 1, depth=depth + 1, topk=topk, vocab_size=199)
    model = base.family.make(base.config, feature_layers=loaded.head.feature_layers)
    decoder = decode.make_decoder(model, drafter, greedy, chunk=8)
    asked = oracle.request(model, [arrays["prompt"].tolist() for arrays in golden], SLOTS, 60)
    state, rounds = decoder.init(base.params, loaded.params, asked), []
    for _ in range(max(len(arrays["length"]) for arrays in golden)):
        before = jax.device_get(state)
        proposal, state = decoder.propose(base.params, loaded.params, state)
        proposal = jax.device_get(proposal)
        state, info = decoder.advance(base.params, loaded.params, state, proposal)
        rounds.append((before, proposal, jax.device_get(info)))
    return loaded, drafter, golden, rounds, jax.device_get(state)


MEDUSA = tree.from_paths(
    [tuple(map(int, path)) for path in "0 1 2 00 01 10 20 000 001 010 100 0000 00000".split()]
)
BEST_FIRST = [
    ("eagle1/head_bias", ("eagle1/head_bias", "eagle2")),
    pytest.param("eagle3/head", ("eagle3/head",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("head", "folders"), [*BEST_FIRST, ("medusa/head", ("medusa/head",))])
def test_every_round_is_the_originals(head, folders):
    """Trees, accepted drafts and the text, with what the head took in after each round before."""
    _, _, golden, rounds, state = trace(head, folders)
    for row, arrays in enumerate(golden):
        masks = np.broadcast_to(arrays["mask"], (len(arrays["length"]), *arrays["mask"].shape[-2:]))
        depths = np.broadcast_to(arrays["depth"], arrays["tokens"].shape)
        for n, (before, proposal, info) in enumerate(rounds[: len(arrays["length"])]):
            assert before.length[row] - 1 == arrays["length"][n]
            np.testing.assert_array_equal(proposal.tokens[row], arrays["tokens"][n])
            np.testing.assert_array_equal(proposal.tree.parent[row], parents(masks[n]))
            np.testing.assert_array_equal(proposal.tree.mask[row], masks[n])
            np.testing.assert_array_equal(proposal.tree.depth[row], depths[n])
            assert info.accepted[row] == arrays["accepted"][n]
        text = arrays["text"].tolist()
        assert oracle.texts(state)[row][: len(text)] == text
    if "tree_parents" in golden[0]:
        np.testing.assert_array_equal(rounds[0][1].tree.parent[0], golden[0]["tree_parents"])


@pytest.mark.parametrize(("head", "folders"), BEST_FIRST)
def test_rolling_forward_is_the_originals(head, folders):
    """Row j takes in the first j + 1 tokens of a round with the target's own features: each is as it was."""
    loaded, drafter, golden, rounds, _ = trace(head, folders)
    for row, arrays in enumerate(golden):
        count = len(arrays["roll_tokens"])
        before = rounds[int(arrays["roll_round"][0])][0].draft
        several = jax.tree.map(
            lambda x, row=row, n=count: jnp.repeat(jnp.asarray(x[row : row + 1]), n, 0), before
        )
        tokens, tapped = jnp.array(arrays["roll_tokens"], jnp.int32), jnp.array(arrays["roll_features"])
        emitted = Emitted(
            jnp.broadcast_to(tokens, (count, count)),
            1 + jnp.arange(count),
            jnp.broadcast_to(tapped, (count, *tapped.shape)),
        )
        after = jax.jit(drafter.absorb)(loaded.params, several, emitted)
        assert_close(after.stream, arrays["roll_hidden"])
        assert_close(after.logits, arrays["roll_logits"])
        assert after.cache.length.tolist() == (before.cache.length[row] + 1 + np.arange(count)).tolist()
        # and this is what the loop went on with
        next_round = rounds[int(arrays["roll_round"][0]) + 1][0].draft
        assert_close(next_round.stream[row], arrays["roll_hidden"][-1])
        assert_close(next_round.logits[row], arrays["roll_logits"][-1])
