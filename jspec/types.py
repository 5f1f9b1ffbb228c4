"""The data that flows through a round, and the contracts `Model`, `Drafter` and `Verifier`.

Data is a `NamedTuple` (a pytree and nothing else); behaviour is a frozen dataclass of
functions that hashes by identity and so works as a static argument of `jax.jit`. What each
function takes and gives is written on its `typing.Protocol`. The library's builders give the
same object for equal arguments (`jspec.built_once`), so equal settings share one program.

House letters: B rows, T tokens fed in one call, S cache slots, N tree nodes (root
included), P path slots (depth + 1), R scratch rows, V vocabulary, W draft vocabulary,
D hidden size, E feature size, H query heads, K kv heads, C head_dim, F MLP size, L layers,
M heads or feature layers, Q stop token ids.

Words: **target** p, **draft** q; the **root** is the newest token, known but not yet
in the target's cache; **emitted** tokens are those that a round adds; to **commit**
is to keep in the cache.

A round: ``propose -> forward -> unembed -> verify -> commit + absorb``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, UInt32

Params = Any
"""A pytree of arrays. Always an argument, never captured in a closure."""


class Tree(NamedTuple):
    """Where the tokens of one pass stand: a tree of nodes. A chain is a tree; a prompt is a chain.

    ``mask = None`` says, statically, that the tree is a chain (node i's parent is
    node i - 1): attention is causal, and committing is a length bump. A drafter may grow in
    several passes without committing: a chain goes on where ``depth`` begins (`jspec.tree.chain`),
    a tree gives the mask of N new rows over all R scratch rows so far. `jspec.tree` makes them.

    >>> import jax.numpy as jnp
    >>> from jspec import tree
    >>> tree.chain(1, 3).mask is None, tree.from_parents(jnp.array([[-1, 0, 0]])).mask[0, 2].tolist()
    (True, [True, False, True])
    """

    parent: Int[Array, "B N"]  # parent[i] < i; -1 for the root and for unused nodes
    depth: Int[Array, "B N"]  # position offset from the root
    mask: Bool[Array, "B N R"] | None = None  # row i may look at node j; R = N but for a drafter's passes


class Proposal(NamedTuple):
    """What a drafter hands to the verifier: a tree of tokens. Node 0 is the root.

    A token id outside the vocabulary ends its branch: no verifier keeps it.

    >>> import jax.numpy as jnp
    >>> from jspec import tree
    >>> guesses = Proposal(jnp.array([[4, 1, 2]]), tree.chain(1, 3), count=jnp.array([3]))
    >>> guesses.logq is None  # point masses
    True
    """

    tokens: Int[Array, "B N"]
    tree: Tree
    count: Int[Array, "B"]  # type: ignore[assignment]  # real nodes, root included: 1 is "nothing proposed"
    logq: Float[Array, "B N V"] | None = None
    # row i: the distribution that node i was drawn from, given its path. None: point masses


class Verdict(NamedTuple):
    """What the verifier decided for each row."""

    path: Int[Array, "B P"]  # nodes from the root to the last accepted one, then 0
    accepted: Int[Array, "B"]  # accepted drafts, the root not counted
    tokens: Int[Array, "B P"]  # what follows each node of the path: the drafts, then the target's own
    logprob: Float[Array, "B P"]  # of these tokens, under the target distribution at each node
    ok: Bool[Array, "B"]  # False: the target's logits at the end were no distribution (NaN, +inf)


class Emitted(NamedTuple):
    """What a round, or a piece of prompt, adds to a row: tokens, and the features that predicted them."""

    tokens: Int[Array, "B T"]
    count: Int[Array, "B"]  # type: ignore[assignment]  # how many of them are real
    features: Float[Array, "B T E"]  # at the position that PREDICTED each token


class Policy(NamedTuple):
    """Sampling settings, one entry a row, all traced. `jspec.sampling.policy.make` checks and makes them.

    A new setting is a field here, its row in `jspec.sampling.policy.SETTINGS`, and a step in
    `jspec.sampling.distribution`.

    >>> from jspec.sampling import policy
    >>> rows = policy.make(2, 50, temperature=[0.0, 0.8], top_p=0.9)
    >>> rows.top_p.tolist(), rows.bias.shape
    ([0.9, 0.9], (2, 50))
    """

    temperature: Float[Array, "B"]  # 0: greedy
    top_k: Int[Array, "B"]  # 0: off
    top_p: Float[Array, "B"]  # 1: off
    min_p: Float[Array, "B"]  # 0: off
    repetition_penalty: Float[Array, "B"]  # 1: off; prompt and generated tokens
    presence_penalty: Float[Array, "B"]  # 0: off; generated tokens only
    frequency_penalty: Float[Array, "B"]  # 0: off; generated tokens only
    min_new_tokens: Int[Array, "B"]  # no stop token before so many others
    bias: Float[Array, "B V"]  # added to the logits; -inf: never


class History(NamedTuple):
    """The text of each row so far; slots of ``tokens`` at and after ``length`` mean nothing.

    >>> import jax.numpy as jnp
    >>> text = History(jnp.array([[7, 8, 0]]), jnp.array([2]), jnp.array([1]), jnp.array([[-1]]))
    >>> (text.length - text.prompt_length).tolist()  # tokens that were written
    [1]
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    stop_token_ids: Int[Array, "B Q"]  # token ids that end a row; -1 fills the table


class Request(NamedTuple):
    """What is asked for each row; everything may differ between rows, nothing is static.

    `jspec.make_request` lays one out from prompts.
    """

    tokens: Int[Array, "B S"]  # the prompt, in a buffer with room for all that follows
    length: Int[Array, "B"]  # of the prompt
    max_length: Int[Array, "B"]  # the length, prompt included, at which a row ends
    stop_token_ids: Int[Array, "B Q"]  # token ids that end a row; -1 fills the table
    policy: Policy
    key: UInt32[Array, "B 2"]  # jspec.sampling.keys.row_keys


class Context(NamedTuple):
    """What a drafter may look at besides its own state. Never the verifier's keys.

    The token at depth d of a tree is drawn with ``fold_in(wrap(key), offset + d)``.
    """

    position: Int[Array, "B"]  # of the root
    policy: Policy
    history: History  # the text up to the root
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

    processed: Float[Array, "B S"]  # under the policy: the distribution it was drawn from
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
    max_length: Int[Array, "B"]  # the length at which a row ends
    stop_token_ids: Int[Array, "B Q"]
    policy: Policy
    key: UInt32[Array, "B 2"]
    finish: Int[Array, "B"]  # RUNNING, STOP, LENGTH or ERROR
    stats: Stats
    logprobs: Logprobs | None  # of the emitted tokens, where the decoder was built to keep them


RUNNING, STOP, LENGTH, ERROR = 0, 1, 2, 3
FINISH_REASONS = {RUNNING: "running", STOP: "stop", LENGTH: "length", ERROR: "error"}


class Info(NamedTuple):
    """What an observer may want to know about one round."""

    tokens: Int[Array, "B P"]
    count: Int[Array, "B"]  # type: ignore[assignment]  # emitted tokens; 0 in finished rows
    accepted: Int[Array, "B"]  # how many of them, the first ones, the draft wrote
    proposed: Int[Array, "B"]
    finish: Int[Array, "B"]


@runtime_checkable
class InitCache(Protocol):
    """An empty cache of so many rows and slots, with ``cache.length`` Int[B] = 0.

    ``scratch`` promises that no pass is wider: layers that see a window may then keep little
    else. None: no promise.
    """

    def __call__(self, batch: int, slots: int, scratch: int | None = None, /) -> Any: ...


@runtime_checkable
class Forward(Protocol):
    """One pass over T tokens a row: prefill, decoding and verification in one.

    Writes T scratch slots after ``cache.length``, and after the rows that earlier passes of the round
    have put there (`jspec.tree.earlier_rows`), and leaves the length alone; row i sees the
    committed slots and the nodes that the tree lets it see. Gives hidden states [B, T, D],
    features [B, T, E] and the cache.
    """

    def __call__(
        self, params: Params, cache: Any, tokens: Int[Array, "B T"], tree: Tree, /
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T E"], Any]: ...


@runtime_checkable
class Commit(Protocol):
    """Keep the first ``count`` nodes of the path: the only way a cache advances.

    ``path = None``: the first nodes themselves.
    """

    def __call__(self, cache: Any, path: Int[Array, "B P"] | None, count: Int[Array, "B"], /) -> Any: ...


@runtime_checkable
class Unembed(Protocol):
    """Logits in float32; apart from `Forward`, for a prompt needs no array of B·T·V."""

    def __call__(self, params: Params, hidden: Float[Array, "B T D"], /) -> Float[Array, "B T V"]: ...


@dataclass(frozen=True, eq=False)
class Model:
    """A language model as pure functions; all fields are static.

    The protocols `InitCache`, `Forward`, `Commit` and `Unembed` say what each takes and gives.

    >>> import jax.numpy as jnp
    >>> from jspec import tree
    >>> from jspec.models import table
    >>> model, params = table.make(3), jnp.zeros((4, 3))
    >>> cache = model.init_cache(2, 8)
    >>> hidden, _, cache = model.forward(params, cache, jnp.array([[0, 1], [2, 0]]), tree.chain(2, 2))
    >>> model.unembed(params, hidden).shape, model.commit(cache, None, jnp.array([2, 1])).length.tolist()
    ((2, 2, 3), [2, 1])
    """

    init_cache: InitCache
    forward: Forward
    commit: Commit
    unembed: Unembed
    vocab_size: int
    context_length: int  # positions the model was made for
    feature_size: int = 0


@runtime_checkable
class InitDraft(Protocol):
    """The drafter's empty state S for a batch.

    No ``emitted`` is longer than ``scratch``, which is at least ``nodes``: what `InitCache` wants to know.
    """

    def __call__(self, params: Params, batch: int, slots: int, scratch: int, /) -> Any: ...


@runtime_checkable
class Absorb(Protocol):
    """Take in confirmed tokens, the prompt's included, in order and each once.

    The only way a draft state advances. Rows take in different numbers, ``emitted.count``; the
    first prompt token comes with a feature of zeros.
    """

    def __call__(self, params: Params, state: Any, emitted: Emitted, /) -> Any: ...


@runtime_checkable
class Propose(Protocol):
    """Draft a tree of tokens below the root, with N = ``nodes`` nodes.

    May scribble into its state beyond its length, but may not move it.
    """

    def __call__(
        self, params: Params, state: Any, root: Int[Array, "B"], context: Context, /
    ) -> tuple[Proposal, Any]: ...


@dataclass(frozen=True, eq=False)
class Drafter:
    """A proposer of tokens, as pure functions; all fields are static. No drafter implements rollback.

    The protocols `InitDraft`, `Absorb` and `Propose` say what each function takes and gives.
    ``growth``, "chain" or "tree", decides which verifiers can judge it (`Verifier`).
    `jspec.sampling.drafters.bigram` is a template in 40 lines.

    >>> from jspec.sampling.drafters import ngram
    >>> drafter = ngram(4)
    >>> drafter.nodes, drafter.depth, drafter.growth
    (5, 4, 'chain')
    """

    init: InitDraft
    absorb: Absorb
    propose: Propose
    nodes: int  # N, root included
    depth: int  # of the tree: P - 1
    growth: str = "chain"


@runtime_checkable
class Accept(Protocol):
    """Each node's chance to be kept when the walk stands at its parent and earlier siblings were refused.

    One row, no batch axis. ``logp``: the target's log-probabilities after each node, path
    included. Of a tree: a node with its children (`jspec.sampling.siblings`), and the
    log-probabilities after that node alone, [1, V]. The root's entry is not used.
    """

    def __call__(self, proposal: Proposal, logp: Float[Array, "M V"], /) -> Float[Array, "N"]: ...


@runtime_checkable
class Residual(Protocol):
    """Log-weights, of any total, of the next token when the walk ends at a node. Arguments as `Accept`."""

    def __call__(
        self, proposal: Proposal, logp: Float[Array, "M V"], node: Int[Array, ""], /
    ) -> Float[Array, "V"]: ...


@runtime_checkable
class Prepare(Protocol):
    """Change ``logp`` before `Accept` and `Residual` see it; ``position``: of the token after each node."""

    def __call__(
        self, row_key: UInt32[Array, "2"], position: Int[Array, "M"], logp: Float[Array, "M V"], /
    ) -> Float[Array, "M V"]: ...


def _unchanged(row_key: Array, position: Array, logp: Array) -> Array:
    return logp


@dataclass(frozen=True, eq=False)
class Verifier:
    """Which drafts are kept, and what follows the last of them; all fields are static.

    The protocols `Accept`, `Residual` and `Prepare` say what each function takes and gives.

    >>> from jspec import verifiers
    >>> verifiers.block.growths, verifiers.typical_lossy.lossless
    (('chain',), False)
    """

    name: str
    accept: Accept
    residual: Residual
    prepare: Prepare = _unchanged
    growths: tuple[str, ...] = ("chain", "tree")  # the kinds of draft that it can judge
    random: bool = True  # False: every chance is 0 or 1, every residual one token
    coupled: bool = False  # drafters draw with the noise that the verifier adds (`keys.coupled_keys`)
    lossless: bool = True  # False: it changes the target distribution, and its name says so
    greedy_only: bool = False  # it is lossless at temperature 0 only
