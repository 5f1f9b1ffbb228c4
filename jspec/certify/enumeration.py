"""The exact output distribution of a verifier, by summing over every draft and every outcome.

A round emits a block of random length; it is extended to a fixed length by drawing from
the target. The verifier is lossless iff the distribution of the result is the target's.

* A target is a function from the tokens emitted so far (a tuple) to a distribution, float64 [V].
* A drafter is a list of all `Draft`s that it may make and their probabilities:
  `sampled_chains` and `point_chain` build such lists, but any list will do, trees too.
  All drafts of a list have one shape, and all of them a q or none.

`output` sums; `jspec.sampling.verifiers.outcomes`, run in float64 on all drafts at once,
decides. Distributions are arrays of shape [V] * length.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.sampling.verifiers import Outcomes, outcomes
from jspec.types import Proposal, Tree, Verifier

Distribution = Callable[[tuple[int, ...]], np.ndarray]


class Draft(NamedTuple):
    weight: float  # the probability that the drafter makes it
    tokens: tuple[int, ...]  # of the nodes; the root's is not looked at
    parent: tuple[int, ...]
    count: int  # type: ignore[assignment]  # hides tuple.count, as it should
    q: np.ndarray | None = None  # [N, V]: the distribution each node was drawn from; None: point masses


class Output(NamedTuple):
    probs: np.ndarray  # of the first tokens, [V] * length
    emitted: float  # expected tokens of the block itself


def random_distribution(
    seed: int, vocab: int, zeros: tuple[int, ...] = (), spread: float = 0.6
) -> Distribution:
    """An independent Dirichlet distribution after each text, in which some tokens never come."""

    @functools.cache
    def probs(prefix: tuple[int, ...]) -> np.ndarray:
        weights = np.random.default_rng([seed, len(prefix), *prefix]).gamma(spread, size=vocab) + 1e-6
        weights[list(zeros)] = 0
        return weights / weights.sum()

    return probs


def sampled_chains(q: Distribution, vocab: int, drafts: int, nodes: int | None = None) -> list[Draft]:
    """Every chain of ``drafts`` tokens drawn from q, padded to ``nodes`` nodes with garbage."""
    nodes = nodes or drafts + 1
    result = []
    for x in itertools.product(range(vocab), repeat=drafts):
        all_probs = np.full((nodes, vocab), 1 / vocab)
        for i in range(drafts):
            all_probs[i + 1] = q(x[:i])
        weight = np.prod([all_probs[i + 1, x[i]] for i in range(drafts)])
        if weight > 0:
            padded = (0, *x, *(vocab - 1,) * (nodes - 1 - drafts))
            result.append(Draft(weight, padded, tuple(range(-1, nodes - 1)), drafts + 1, all_probs))
    return result


def point_chain(tokens: Sequence[int], nodes: int | None = None) -> list[Draft]:
    """The one chain of a drafter that always proposes these tokens."""
    nodes = nodes or len(tokens) + 1
    padded = (0, *tokens, *(0,) * (nodes - 1 - len(tokens)))
    return [Draft(1.0, padded, tuple(range(-1, nodes - 1)), len(tokens) + 1)]


def target_distribution(target: Distribution, length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """The distribution of ``length`` tokens after a prefix, [V] * length."""
    if length == 0:
        return np.ones(())
    first = target(prefix)
    rest = [target_distribution(target, length - 1, (*prefix, x)) for x in range(len(first))]
    return first.reshape(-1, *(1,) * (length - 1)) * np.stack(rest)


def output(
    verifier: Verifier,
    target: Distribution,
    drafts: list[Draft],
    length: int,
    dtype: type = np.float64,
    tail: Distribution | None = None,
) -> Output:
    """The distribution of the first ``length`` tokens: a round of this verifier, then draws from ``tail``."""
    vocab = len(target(()))
    after = functools.cache(lambda prefix: target_distribution(tail or target, length - len(prefix), prefix))
    probs, emitted = np.zeros((vocab,) * length), 0.0
    rows = [[target(path) for path in _paths(draft)] for draft in drafts]
    plans = _plans(verifier, drafts, np.asarray(rows), dtype)
    for draft, accept, residual in zip(drafts, *plans, strict=True):
        for path, ends in _ends(draft, accept):
            for x in np.flatnonzero(residual[path[-1]]):
                text = (*(draft.tokens[i] for i in path[1:]), int(x))
                weight = draft.weight * ends * residual[path[-1], x]
                probs[text] += weight * after(text)
                emitted += weight * len(text)
    return Output(probs, emitted)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Total variation."""
    return 0.5 * float(np.abs(a - b).sum())


def error(verifier: Verifier, target: Distribution, drafts: list[Draft], dtype: type = np.float64) -> float:
    """How far a round of the verifier takes the text from the target's distribution: 0 if it is lossless.

    >>> from jspec.sampling.verifiers import token
    >>> p, q = random_distribution(0, vocab=3), random_distribution(1, vocab=3)
    >>> error(token, p, sampled_chains(q, vocab=3, drafts=2)) < 1e-12
    True
    """
    length = max(draft.count for draft in drafts)
    return distance(
        output(verifier, target, drafts, length, dtype).probs, target_distribution(target, length)
    )


def _paths(draft: Draft) -> list[tuple[int, ...]]:
    """The drafted tokens from the root to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens[1:], draft.parent[1:], strict=True):
        paths.append((*paths[max(parent, 0)], token))
    return paths


def _ends(draft: Draft, accept: np.ndarray):
    """Every path on which the walk may end, as nodes, and its probability."""
    walks: list[tuple[tuple[int, ...], float]] = [((0,), 1.0)]
    for path, weight in walks:
        children = [i for i in range(1, draft.count) if draft.parent[i] == path[-1]]
        for child in children:
            walks.append(((*path, child), weight * accept[child]))
            weight = weight * (1 - accept[child])
        yield path, weight


@functools.cache
def _compiled(verifier: Verifier):
    return jax.jit(jax.vmap(functools.partial(outcomes, verifier)))


def _plans(
    verifier: Verifier, drafts: list[Draft], probs: np.ndarray, dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The verifier's chances [drafts, N] and residual distributions [drafts, N, V]."""
    with jax.enable_x64(dtype == np.float64), np.errstate(divide="ignore"):
        logq = None if drafts[0].q is None else np.log(np.array([draft.q for draft in drafts]))
        proposal = Proposal(
            jnp.asarray([draft.tokens for draft in drafts]),
            layout(drafts[0].parent, len(drafts)),
            jnp.asarray([draft.count for draft in drafts]),
            None if logq is None else jnp.asarray(logq, dtype),
        )
        made: Outcomes = jax.device_get(_compiled(verifier)(proposal, jnp.asarray(np.log(probs), dtype)))
    log_weights = made.residual.astype(np.float64)
    weights = np.exp(log_weights - log_weights.max(axis=-1, keepdims=True))
    return np.minimum(made.accept.astype(np.float64), 1.0), weights / weights.sum(axis=-1, keepdims=True)


def layout(parent: Sequence[int], batch: int) -> Tree:
    """So many rows of one shape."""
    if list(parent) == list(range(-1, len(parent) - 1)):
        return tree.chain(batch, len(parent))
    return tree.from_parents(jnp.broadcast_to(jnp.array(parent), (batch, len(parent))))
