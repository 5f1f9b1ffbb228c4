"""The exact distribution of a round under every policy: `distribution.log_probs` and a verifier together.

The target's and the draft's raw logits are random tables, one row for each text that may
follow the root. The distributions are those of the library: what is wanted and q from one call a
text, the drafts appended to the history as plain decoding and a draft model do; p from a
single call on a whole chain or tree of nodes, so that penalties and ``min_new_tokens`` must see
the draft's own prefix. The output distribution is summed over every draft and every outcome, in
float64 (`jspec.certify.enumeration`).

A text below the root is named by its place in the list of `texts`: place 0 is the root,
and ``place * V + token + 1`` what follows. Distributions are arrays [places, V].
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.certify import enumeration
from jspec.errors import JspecError
from jspec.sampling import distribution, policy
from jspec.types import History, Tree, Verifier

DRAFTS = 3
CHAIN, FORK = (-1, 0, 1, 2), (-1, 0, 0, 2)  # parents; the fork's second branch goes on
TEXT, PROMPT, STOP = (0, 2, 0), 1, np.array([1, -1], np.int32)  # token 1 is fresh, and ends a row
POSITION = len(TEXT) - 1  # of the root


class Exact(NamedTuple):
    """A verifier's largest total-variation error over the policies and the pairs of distributions tried."""

    verifier: str
    drafts: str
    policies: int
    error: float
    worst: str  # the policy and the pair of distributions that it was found with


def exact_distribution(verifier: Verifier, limit: int | None = None) -> list[Exact]:
    """Sum the output distribution of a verifier exactly, for each kind of draft that it can judge.

    Under all `policies` if the verifier throws uniform numbers, under those of temperature 0 if it does
    not (`coupled`, whose choice is a draw only over its noise, has no distribution to sum: its
    evidence is the χ² of the loop). ``limit``: try only so many pairs of distributions.

    Raises:
        JspecError: the verifier is lossy by its own words, so that there is nothing to certify.

    >>> from jspec.sampling.verifiers import greedy
    >>> [(found.drafts, found.error < 1e-12) for found in exact_distribution(greedy, limit=1)]
    [('sampled chain', True), ('points chain', True), ('sampled tree', True), ...]
    """
    check_lossless(verifier)
    if verifier.coupled:
        return []
    found = []
    names = [name for name in policies(4) if verifier.random or name.endswith("temperature 0")]
    for kind, (growth, parent, drafter) in DRAFT_KINDS.items():
        if growth not in verifier.growths:
            continue
        errors = {}
        for pair, name in itertools.product(list(INSTANCES)[:limit], names):
            p, q, wanted = all_probs(pair, name, parent)
            errors[f"{name}, {pair}"] = np.nan_to_num(error(verifier, p, drafter(q), wanted), nan=np.inf)
        worst = max(errors, key=errors.__getitem__)
        found.append(Exact(verifier.name, kind, len(names), float(errors[worst]), worst))
    return found


def check_lossless(verifier: Verifier) -> None:
    """Raise `JspecError` for a verifier that says it is lossy."""
    if not verifier.lossless:
        raise JspecError(
            f"the verifier {verifier.name!r} is lossy: it changes the distribution by design, there is "
            "nothing to certify"
        )


def policies(vocab: int) -> dict[str, dict[str, Any]]:
    """Settings of `jspec.sampling.policy.make` that the exact distribution is tried with, by name."""
    last = vocab - 1
    mixed: dict[str, Any] = dict(top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=1.5)
    mixed |= dict(presence_penalty=0.7, frequency_penalty=-0.5, min_new_tokens=4)
    mixed |= dict(logit_bias={0: 1.0, 1: 0.5}, allowed=range(last), banned=(last,))
    return {
        "neutral": {},
        **{f"temperature {t}": dict(temperature=t) for t in (0, 0.7, 1.6)},
        "top-k": dict(top_k=2),
        "top-p": dict(top_p=0.7),
        "min-p": dict(min_p=0.3),
        "hot top-p": dict(temperature=2.0, top_p=0.7),
        "repetition": dict(repetition_penalty=3.0),
        "presence": dict(presence_penalty=2.0),
        "frequency": dict(frequency_penalty=1.5),
        "logit bias": dict(logit_bias={0: 1.5, 1: -1.0}),
        "allowed": dict(allowed=range(last)),
        "banned": dict(banned=(0,)),
        "min_new_tokens": dict(min_new_tokens=4),  # two are written: it ends after two drafts
        "all": mixed | dict(temperature=0.7),
        "all at temperature 0": mixed | dict(temperature=0.0),
    }


def tables(vocab: int, p_never=(), q_never=(), same: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Raw logits of target and draft after each text."""
    p, q = 1.5 * np.random.default_rng(vocab).standard_normal((2, len(texts(vocab)), vocab))
    p[:, list(p_never)] = -np.inf
    q[:, list(q_never)] = -np.inf
    return p, p if same else q


@functools.cache
def texts(vocab: int) -> list[tuple[int, ...]]:
    """All of at most as many tokens as are drafted, the shortest first."""
    return [text for n in range(DRAFTS + 1) for text in itertools.product(range(vocab), repeat=n)]


def place(vocab: int, text: tuple[int, ...]) -> int:
    """Where a text stands in the list of `texts`."""
    return functools.reduce(lambda at, token: at * vocab + token + 1, text, 0)


INSTANCES = {
    "random": tables(4),
    "random, 3 tokens": tables(3),
    "random, 5 tokens": tables(5),
    "q has zeros": tables(4, q_never=[2]),  # as of a draft with a smaller vocabulary
    "p has zeros": tables(4, p_never=[2]),
    "p = q": tables(4, same=True),
    "disjoint": tables(4, p_never=[2, 3], q_never=[0, 1]),
    "padded vocabulary": tables(4, p_never=[3], q_never=[3]),
}
"""Pairs of raw logits, of target and draft."""

apply = jax.jit(distribution.log_probs)


def places(tokens: np.ndarray, layout: Tree, vocab: int) -> np.ndarray:
    """The place of each node of each row."""
    at = np.zeros(tokens.shape, int)
    for node in range(1, tokens.shape[1]):
        above = np.take_along_axis(at, np.asarray(layout.parent[:, node, None]), axis=1)[:, 0]
        at[:, node] = above * vocab + tokens[:, node] + 1
    return at


def history(rows: list[tuple[int, ...]]) -> History:
    """The text up to the root, and then these tokens."""
    tokens = np.zeros((len(rows), len(TEXT) + DRAFTS), np.int32)
    for row, more in zip(tokens, rows, strict=True):
        row[: len(TEXT) + len(more)] = TEXT + more
    length = np.array([len(TEXT) + len(more) for more in rows], np.int32)
    start, stop = np.full_like(length, PROMPT), np.tile(STOP, (len(rows), 1))
    return History(*map(jnp.asarray, (tokens, length, start, stop)))


def one_by_one(logits: np.ndarray, options: dict, forgetful: bool = False) -> np.ndarray:
    """The library's distributions, a single node a call, what was drafted before it in the history."""
    count, vocab = logits.shape
    text = history([() if forgetful else text for text in texts(vocab)])
    root = jnp.take_along_axis(text.tokens, text.length[:, None] - 1, axis=1)
    with jax.enable_x64(True):
        settings = policy.make(count, vocab, **options)
        return np.exp(apply(settings, text, root, tree.chain(count, 1), logits[:, None]))[:, 0]


def whole_drafts(logits: np.ndarray, options: dict, parent: tuple[int, ...] = CHAIN) -> np.ndarray:
    """The library's distributions at all nodes of every draft of a shape, from one call; NaN elsewhere."""
    vocab = logits.shape[1]
    drafts = list(itertools.product(range(vocab), repeat=len(parent) - 1))
    nodes = np.insert(np.array(drafts, np.int32), 0, TEXT[-1], axis=1)
    with jax.enable_x64(True):
        settings, layout = policy.make(len(drafts), vocab, **options), enumeration.layout(parent, len(drafts))
        at = places(nodes, layout, vocab)
        found = np.exp(apply(settings, history([()] * len(drafts)), nodes, layout, logits[at]))
    probs = np.full_like(logits, np.nan)
    probs[at] = found
    if np.abs(probs[at] - found).max() > 1e-15:
        raise AssertionError("what is drafted elsewhere changes the distribution at a node")
    return probs


class AllProbs(NamedTuple):
    p: np.ndarray
    q: np.ndarray
    wanted: np.ndarray  # what p should be


@functools.cache
def all_probs(pair: str, name: str, parent: tuple[int, ...] = CHAIN) -> AllProbs:
    """p, q and what is wanted, for a pair of `INSTANCES`, a policy of `policies`, and drafts of a shape."""
    p, q = INSTANCES[pair]
    options = policies(p.shape[1])[name]
    return AllProbs(whole_drafts(p, options, parent), one_by_one(q, options), one_by_one(p, options))


def distribution_of(probs: np.ndarray) -> enumeration.Distribution:
    return lambda text: probs[place(probs.shape[1], text)]


def sampled(
    q: np.ndarray, stated: np.ndarray | None = None, parent: tuple[int, ...] = CHAIN, again: bool = False
) -> list[enumeration.Draft]:
    """Every draft, also those that never come (so that shapes stay), with q of each token.

    ``stated``: distributions to be told instead. ``again``: siblings are drawn with replacement.
    """
    vocab = q.shape[1]
    drafts = []
    for tokens in itertools.product(range(vocab), repeat=len(parent) - 1):
        at, said, weight = [0], [np.zeros(vocab)], 1.0  # the root's distribution is not looked at
        for node, token in enumerate(tokens, start=1):
            above = at[parent[node]]
            taken = [tokens[n - 1] for n in range(1, node) if parent[n] == parent[node] and not again]
            probs, told = (_left(x[above], taken) for x in (q, q if stated is None else stated))
            if probs.any():
                weight *= probs[token]
            else:  # nothing is left to draw: any token, as a point mass
                weight *= token == min(set(range(vocab)) - set(taken))
            at.append(above * vocab + token + 1)
            said.append(told)
        drafts.append(enumeration.Draft(float(weight), (0, *tokens), parent, len(parent), np.array(said)))
    return drafts


def _left(probs: np.ndarray, taken: list[int]) -> np.ndarray:
    """A distribution without the tokens that earlier siblings took; zeros if nothing is left."""
    rest = probs.copy()
    rest[taken] = 0.0
    return rest / rest.sum() if rest.sum() > 0 else rest


def points(q: np.ndarray, parent: tuple[int, ...] = CHAIN) -> list[enumeration.Draft]:
    """Every draft as point masses, whatever q: any mixture of them must keep the target's distribution."""
    drafts = sampled(q, parent=parent)
    weights = np.random.default_rng(1).dirichlet(np.ones(len(drafts)))
    return [draft._replace(weight=w, q=None) for draft, w in zip(drafts, weights, strict=True)]


class Kind(NamedTuple):
    """What a drafter may make of its distribution q, and the shape of it."""

    growth: str
    parent: tuple[int, ...]
    drafts: Callable[[np.ndarray], list[enumeration.Draft]]


DRAFT_KINDS = {
    "sampled chain": Kind("chain", CHAIN, sampled),
    "points chain": Kind("chain", CHAIN, points),
    "sampled tree": Kind("tree", FORK, functools.partial(sampled, parent=FORK)),
    "sampled tree, with replacement": Kind("tree", FORK, functools.partial(sampled, parent=FORK, again=True)),
    "points tree": Kind("tree", FORK, functools.partial(points, parent=FORK)),
}


def error(verifier: Verifier, p: np.ndarray, drafts: list[enumeration.Draft], wanted: np.ndarray) -> float:
    """How far the verifier, given p, takes the text from the wanted distribution."""
    made = enumeration.output(
        verifier, distribution_of(p), drafts, DRAFTS + 1, tail=distribution_of(wanted)
    ).probs
    return enumeration.distance(made, enumeration.target_distribution(distribution_of(wanted), DRAFTS + 1))
