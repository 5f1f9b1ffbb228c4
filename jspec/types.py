"""The vocabulary of jspec and its two contracts, `Model` and `Drafter`.

Data is a `NamedTuple` (a pytree and nothing else); behaviour is a frozen dataclass
of functions that hashes by identity and so works as a static argument.

House letters: B rows, T tokens fed in one call, S cache slots, N tree nodes (root
included), P path slots (depth + 1), V vocabulary, W draft vocabulary, D width, E feature
width, H query heads, K kv heads, C channels a head, F MLP width, L layers, M heads or
tapped layers, Q stop ids.

Words: **target** p, **draft** q; the **root** is the newest token, known but not yet
in the target's cache; **emitted** tokens are those that a round adds; to **commit**
is to keep in the cache.

A round: ``propose -> forward -> unembed -> verify -> commit + absorb``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

Params = Any
"""A pytree of arrays. Always an argument, never captured in a closure."""


class Tree(NamedTuple):
    """Where the tokens of one pass stand. A chain is a tree; a prompt is a chain.

    ``mask = None`` says, statically, that the tree is a chain (node i's parent is
    node i - 1): attention is causal, and committing is a length bump. A drafter that grows
    a tree in several passes gives the mask of N new rows over all R scratch rows so far.
    """

    parent: Int[Array, "B N"]  # parent[i] < i; -1 for the root and for unused nodes
    depth: Int[Array, "B N"]  # position offset from the root
    mask: Bool[Array, "B N R"] | None = None  # row i may look at node j; R = N but for a drafter's passes


class Proposal(NamedTuple):
    """What a drafter hands to the verifier. Node 0 is the root."""

    tokens: Int[Array, "B N"]
    tree: Tree
    count: Int[Array, "B"]  # real nodes, root included: 1 means "nothing proposed"
    logq: Float[Array, "B N V"] | None = None
    # row i: the law that node i was drawn from, given its path. None: point masses


class Verdict(NamedTuple):
    """What the verifier decided for each row."""

    path: Int[Array, "B P"]  # nodes from the root to the last accepted one, then 0
    accepted: Int[Array, "B"]  # accepted drafts, the root not counted
    tokens: Int[Array, "B P"]  # what follows each node of the path: the drafts, then the target's own
    logprob: Float[Array, "B P"]  # of these tokens, under the law at each node
    ok: Bool[Array, "B"]  # False: the target's law at the end was not a law (NaN, +inf)


class Emitted(NamedTuple):
    """What a round, or a piece of prompt, adds to a row."""

    tokens: Int[Array, "B T"]
    count: Int[Array, "B"]  # how many of them are real
    features: Float[Array, "B T E"]  # at the position that PREDICTED each token


class Request(NamedTuple):
    """What is asked for each row; everything may differ between rows, nothing is static."""

    tokens: Int[Array, "B S"]  # the prompt, in a buffer with room for all that follows
    length: Int[Array, "B"]  # of the prompt
    limit: Int[Array, "B"]  # the length, prompt included, at which a row ends
    stop: Int[Array, "B Q"]  # token ids that end a row; -1 fills the table
    policy: Any  # jspec.sampling.policy.Policy: the rows of the target law
    key: UInt32[Array, "B 2"]  # jspec.sampling.keys.row_keys


class Context(NamedTuple):
    """What a drafter may look at besides its own state. Never the verifier's keys.

    The token at depth d of a tree is drawn with ``fold_in(wrap(key), offset + d)``.
    """

    position: Int[Array, "B"]  # of the root
    policy: Any  # jspec.sampling.policy.Policy
    history: Any  # jspec.sampling.policy.History: the text up to the root
    key: UInt32[Array, "B 2"]
    offset: Int[Array, "B"]


class Stats(NamedTuple):
    """Counts for each row since `init`; nothing after a stop token is counted.

    Of a tree each depth counts once a round, however many of its nodes were drafted.
    """

    rounds: Int[Array, "B"]  # target passes the row took part in
    proposed: Int[Array, "B depth"]  # drafts submitted at depth 1, 2, ...
    accepted: Int[Array, "B depth"]  # drafts accepted at depth 1, 2, ...


class Logprobs(NamedTuple):
    """Natural logarithms of the probability that each emitted token had; 0 in prompt slots."""

    processed: Float[Array, "B S"]  # under the policy: the law it was drawn from
    raw: Float[Array, "B S"]  # under the model's own softmax


class State(NamedTuple):
    """Everything the next round needs: the `while_loop` carry, and what one saves.

    Invariant: ``cache.length == length - 1`` in rows that still run. Slots of
    ``tokens`` at and after ``length`` mean nothing.
    """

    cache: Any
    draft: Any  # the drafter's own state
    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]  # prompt and emitted tokens
    prompt_length: Int[Array, "B"]
    limit: Int[Array, "B"]  # the length at which a row ends
    stop: Int[Array, "B Q"]
    policy: Any
    key: UInt32[Array, "B 2"]
    finish: Int[Array, "B"]  # RUNNING, STOP, LENGTH or ERROR
    stats: Stats
    logprobs: Logprobs | None  # of the emitted tokens, where the decoder was built to keep them


RUNNING, STOP, LENGTH, ERROR = 0, 1, 2, 3
FINISH_REASONS = {RUNNING: "running", STOP: "stop", LENGTH: "length", ERROR: "error"}


class Info(NamedTuple):
    """What an observer may want to know about one round."""

    tokens: Int[Array, "B P"]
    count: Int[Array, "B"]  # emitted tokens; 0 in finished rows
    accepted: Int[Array, "B"]  # how many of them, the first ones, the draft wrote
    proposed: Int[Array, "B"]
    finish: Int[Array, "B"]


@dataclass(frozen=True, eq=False)
class Model:
    """A language model as pure functions.

    * ``init_cache(batch, slots, scratch=None) -> cache`` with ``cache.length`` Int[B] = 0.
      ``scratch`` promises that no pass is wider, and that the length is never moved back
      by more: layers that see a window may then keep little else. None: no promise.
    * ``forward(params, cache, tokens_BT, tree) -> (hidden_BTD, features_BTE, cache)``
      writes T scratch slots after ``cache.length`` and leaves the length alone; row i
      sees the committed slots and the nodes that the tree lets it see. It is prefill,
      decoding and verification in one.
    * ``commit(cache, path_BP, count_B) -> cache`` keeps the first ``count`` nodes of
      the path: the only way a cache advances. ``path = None``: the first nodes.
    * ``unembed(params, hidden_BTD) -> logits_BTV`` in float32; apart from ``forward``,
      for a prompt needs no B*T*V array.
    """

    init_cache: Callable[..., Any]
    forward: Callable[..., tuple[Array, Array, Any]]
    commit: Callable[..., Any]
    unembed: Callable[[Params, Array], Array]
    vocab_size: int
    max_length: int  # positions the model was made for
    feature_width: int = 0


@dataclass(frozen=True, eq=False)
class Head:
    """A draft head that reads the target's features and writes token after token (EAGLE).

    Row j takes the feature f_j and the token x_{j+1}, stands at position j, and its
    logits are for x_{j+2}: the features go with the tokens shifted left by one.

    * ``fuse(params, features_BTE) -> stream_BTD``: what a row takes from the target.
    * ``forward(params, cache, tokens_BT, stream_BTD, tree) -> (hidden_BTD, stream_BTD, cache)``
      is `Model.forward` with one more input. ``hidden`` is for ``unembed``; the stream that
      comes out is what a row at the next position takes in the target's place.
    * ``init_cache``, ``commit`` and ``unembed`` are those of `Model`; the logits are over
      the head's own vocabulary of W = ``vocab_size`` ids.
    * Where ``params`` has ``ids`` (Int[W], increasing), draft id w is the target's
      ``ids[w]``; where it has none they are the same.
    """

    init_cache: Callable[..., Any]
    fuse: Callable[[Params, Array], Array]
    forward: Callable[..., tuple[Array, Array, Any]]
    commit: Callable[..., Any]
    unembed: Callable[[Params, Array], Array]
    vocab_size: int  # W
    width: int  # D
    feature_width: int  # E
    taps: tuple[int, ...]  # which of the target's streams make a feature (`jspec.models.decoder.make`)
    max_length: int  # positions the head was made for


@dataclass(frozen=True, eq=False)
class Heads:
    """Heads that each guess one token from the same feature and see no other guess (Medusa).

    ``forward(params, features_BTE) -> logits_BTMW`` in float32: at the feature f_j, head m
    guesses x_{j+2+m}. ``ids`` as in `Head`, but in any order.
    """

    forward: Callable[[Params, Array], Array]
    count: int  # M
    vocab_size: int  # W
    feature_width: int  # E
    taps: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Drafter:
    """A proposer of tokens, as pure functions. No drafter implements rollback.

    * ``init(params, batch, slots, scratch) -> S``; no ``emitted`` is longer than ``scratch``,
      which is at least ``nodes``: what `Model.init_cache` wants to know.
    * ``absorb(params, S, emitted) -> S`` takes in confirmed tokens, the prompt's
      included, in order and each once: the only way a draft state advances. The first
      prompt token comes with a feature of zeros.
    * ``propose(params, S, root_B, context) -> (proposal, S)`` may scribble beyond its
      length, but may not move it. N = ``nodes`` and P = ``depth + 1`` are static.
    * ``growth``: "chain" or "tree"; `jspec.sampling.verify` says which rules judge which.
    """

    init: Callable[..., Any]
    absorb: Callable[..., Any]
    propose: Callable[..., tuple[Proposal, Any]]
    nodes: int
    depth: int
    growth: str = "chain"
