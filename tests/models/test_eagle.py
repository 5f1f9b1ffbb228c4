"""EAGLE's heads against their original code, and how a pass may be cut."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.types import Tree
from jspec.weights.heads import load_head
from jspec.weights.load import load_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "heads"
EAGLE1 = ["eagle1/head_bias", "eagle1/head_nobias"]
EAGLE3 = [f"eagle3/{folder.name}" for folder in sorted((GOLDEN / "eagle3").glob("head*"))]
SLOTS = 32


@lru_cache
def target(method: str):
    return load_checkpoint(GOLDEN / method / "target")


@lru_cache
def features(method: str, feature_layers: tuple[int, ...], prompt: tuple[int, ...]):
    """What the target's feature layers give on a prompt."""
    base, tokens = target(method), jnp.array([prompt])
    model = base.family.make(base.config, feature_layers=feature_layers)
    cache = model.init_cache(1, SLOTS)
    return jax.jit(model.forward)(base.params, cache, tokens, tree.chain(*tokens.shape))[1]


@lru_cache
def load(case: str):
    """A head, its jitted step, and the golden arrays with the target's features on the prompt."""
    base = target(case.split("/")[0])
    loaded = load_head(GOLDEN / case, base)
    with np.load(GOLDEN / case / "golden.npz") as saved:
        golden = dict(saved)
    features_of_prompt = features(
        case.split("/")[0], loaded.head.feature_layers, tuple(golden["prompt"].tolist())
    )

    @jax.jit
    def step(params, cache, tokens, stream, tree):
        hidden, stream, cache = loaded.head.forward(params, cache, tokens, stream, tree)
        return loaded.head.unembed(params, hidden), stream, cache

    return loaded, step, golden, features_of_prompt


def assert_close(got, wanted) -> None:
    """Within 1e-5 of the range of the values."""
    assert np.abs(np.asarray(got) - wanted).max() < 1e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("case", [*EAGLE1, *EAGLE3])
def test_a_head_drafts_what_the_original_does(case):
    loaded, step, golden, features_of_prompt = load(case)
    head, params = loaded.head, loaded.params
    if "features" in golden:
        assert_close(features_of_prompt[0], golden["features"])
    stream = jax.jit(head.fuse)(params, features_of_prompt)
    if "fused" in golden:
        assert_close(stream[0], golden["fused"])
    tokens = jnp.array(golden["tokens"], jnp.int32)[None]
    cache, drafts = head.init_cache(1, SLOTS), []
    logits = [golden["logits"], *golden["step_logits"][:, None]]
    outputs = [golden["hidden"], *golden["step_hidden"][:, None]]
    for wanted, output in zip(logits, outputs, strict=True):
        got, stream, cache = step(params, cache, tokens, stream, tree.chain(*tokens.shape))
        cache = head.commit(cache, None, jnp.array([tokens.shape[1]]))
        assert_close(got[0], wanted)
        if not getattr(loaded.config, "norm_output", False):
            assert_close(stream[0], output)
        best = int(got[0, -1].argmax())
        drafts.append(int(params["ids"][best]) if "ids" in params else best)
        tokens, stream = jnp.array([drafts[-1:]]), stream[:, -1:]
    assert drafts == golden["drafts"].tolist()


CASES = ["eagle1/head_nobias", "eagle3/head", "eagle3/head_speculators_qwen3_fcnorm_normoutput_2layer"]


def prompt_rows(case):
    """The head's input on the prompt."""
    loaded, _, golden, features_of_prompt = load(case)
    return jnp.array(golden["tokens"], jnp.int32)[None], loaded.head.fuse(loaded.params, features_of_prompt)


@pytest.mark.parametrize("case", CASES[:2])
def test_mutants_without_the_token_shift_or_with_other_positions(case):
    loaded, step, golden, _ = load(case)
    tokens, stream = prompt_rows(case)
    chain, cache = tree.chain(*tokens.shape), loaded.head.init_cache(1, SLOTS)
    unshifted = jnp.array(golden["prompt"], jnp.int32)[None]
    # A constant offset is no mutant: RoPE sees differences.
    for fed, shape in ((unshifted, chain), (tokens, chain._replace(depth=chain.depth * 2))):
        logits, _, _ = step(loaded.params, cache, fed, stream, shape)
        with pytest.raises(AssertionError):
            assert_close(logits[0], golden["logits"])


@pytest.mark.parametrize("case", CASES)
def test_a_text_may_be_cut_anywhere(case):
    loaded, step, golden, _ = load(case)
    tokens, stream = prompt_rows(case)
    for sizes in ((1,) * 12, (5, 1, 1, 5)):
        cache, logits, start = loaded.head.init_cache(1, SLOTS), [], 0
        for size in sizes:
            fed, taken = tokens[:, start : start + size], stream[:, start : start + size]
            got, _, cache = step(loaded.params, cache, fed, taken, tree.chain(1, size))
            cache = loaded.head.commit(cache, None, jnp.array([size]))
            logits.append(got[0])
            start += size
        assert_close(np.concatenate(logits), golden["logits"])


def test_rows_of_a_batch_stand_where_they_are():
    loaded, step, golden, _ = load("eagle3/head")
    tokens, stream = (jnp.repeat(x, 2, axis=0) for x in prompt_rows("eagle3/head"))
    cache = loaded.head.init_cache(2, SLOTS)
    _, _, cache = step(loaded.params, cache, tokens, stream, tree.chain(*tokens.shape))
    starts = jnp.array([7, 5])
    cache = loaded.head.commit(cache, None, starts)
    index = starts[:, None] + jnp.arange(3)
    fed = jnp.take_along_axis(tokens, index, axis=1)
    taken = jnp.take_along_axis(stream, index[..., None], axis=1)
    logits, _, _ = step(loaded.params, cache, fed, taken, tree.chain(2, 3))
    assert_close(logits, golden["logits"][np.asarray(index)])


PARENTS = [-1, 0, 0, 1, 1, 2, 3, 4, 4]
LEVELS = [(0, 1), (1, 3), (3, 9)]


@pytest.mark.parametrize("case", CASES[2:])
def test_a_tree_in_one_pass_level_by_level_and_path_by_path(case):
    """With streams of the test's own: in drafting, those of a level come out of the one before."""
    loaded, step, golden, _ = load(case)
    head, params = loaded.head, loaded.params
    tokens, stream = prompt_rows(case)
    _, _, cache = step(params, head.init_cache(1, SLOTS), tokens, stream, tree.chain(*tokens.shape))
    cache = head.commit(cache, None, jnp.array([12]))
    rng = np.random.default_rng(0)
    nodes = jnp.array(rng.integers(0, 199, (1, len(PARENTS))))
    stream = jnp.array(rng.normal(size=(1, len(PARENTS), head.hidden_size)), jnp.float32)
    whole = tree.from_parents(jnp.array([PARENTS]))
    logits, out, scribbled = step(params, cache, nodes, stream, whole)
    assert scribbled.length.tolist() == [12]

    grown, passes = cache, []
    for start, stop in LEVELS:
        rows = slice(start, stop)
        part = Tree(whole.parent[:, rows], whole.depth[:, rows], whole.mask[:, rows, :stop])
        got, _, grown = step(params, grown, nodes[:, rows], stream[:, rows], part)
        passes.append(got)
    assert_close(np.concatenate(passes, axis=1), np.asarray(logits))

    path = jnp.array([[0, 1, 4, 8]])
    alone, after, straight = step(params, cache, nodes[:, path[0]], stream[:, path[0]], tree.chain(1, 4))
    assert_close(alone, np.asarray(logits[:, path[0]]))
    assert_close(after, np.asarray(out[:, path[0]]))

    # Keeping the path leaves the cache of a text that had it.
    kept = head.commit(grown, path, jnp.array([4]))
    assert kept.length.tolist() == [16]
    for got, wanted in zip(jax.tree.leaves(kept.layers), jax.tree.leaves(straight.layers), strict=True):
        assert_close(got[:, :, :16], np.asarray(wanted[:, :, :16]))
