"""The exact law of a round under every policy: `policy.apply` and a verification rule together.

The target's and the draft's raw logits are random tables, one row for each text that may
follow the root. The laws are those of the library: q from one call a text, the drafts
appended to the history as a draft model does; p from a single call on the whole chain of
nodes, so that penalties and `min_new_tokens` must see the draft's own prefix. What comes
out is compared with the slow law, made text by text.

A text below the root is named by its place in the list of `texts`: place 0 is the root,
and ``place * V + token + 1`` what follows. Laws are arrays [places, V].
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.sampling import keys, policy
from jspec.sampling.drafters.model import Draft, model
from jspec.sampling.policy import History
from jspec.sampling.verify import block, coupled, greedy, token, verify
from jspec.types import Context, Model, Proposal
from tests.sampling import exact, slow_policy

DRAFTS = 3
TEXT, PROMPT, STOP = (0, 2, 0), 1, (1, -1)  # token 1 is fresh, and ends a row
POSITION = len(TEXT) - 1  # of the root


def policies(vocab: int) -> dict[str, dict]:
    last = vocab - 1
    mixed = dict(top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=1.5, presence_penalty=0.7)
    mixed |= dict(frequency_penalty=-0.5, logit_bias={0: 1.0, 1: 0.5}, allowed=range(last), banned=(last,))
    mixed |= dict(min_new_tokens=4)
    return {
        "neutral": {},
        "temperature 0": dict(temperature=0.0),
        "temperature 0.7": dict(temperature=0.7),
        "temperature 1.6": dict(temperature=1.6),
        "top-k": dict(top_k=2),
        "top-p": dict(top_p=0.7),
        "min-p": dict(min_p=0.3),
        "temperature 2 and top-p": dict(temperature=2.0, top_p=0.7),
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


POLICIES = tuple(policies(3))


class Tables(NamedTuple):
    """Raw logits after each text."""

    p: np.ndarray
    q: np.ndarray


def tables(vocab: int, p_never=(), q_never=(), same: bool = False) -> Tables:
    p, q = 1.5 * np.random.default_rng(vocab).standard_normal((2, len(texts(vocab)), vocab))
    p[:, list(p_never)] = -np.inf
    q[:, list(q_never)] = -np.inf
    return Tables(p, p if same else q)


@functools.cache
def texts(vocab: int) -> list[tuple[int, ...]]:
    """All of at most as many tokens as are drafted, the shortest first."""
    return [text for n in range(DRAFTS + 1) for text in itertools.product(range(vocab), repeat=n)]


def place(vocab: int, text: tuple[int, ...]) -> int:
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

apply = jax.jit(policy.apply)


def history(rows: list[tuple[int, ...]]) -> History:
    """The text up to the root, and then these tokens."""
    tokens = np.zeros((len(rows), len(TEXT) + DRAFTS), np.int32)
    for row, more in zip(tokens, rows, strict=True):
        row[: len(TEXT) + len(more)] = TEXT + more
    length = np.int32([len(TEXT) + len(more) for more in rows])
    return History(tokens, length, np.full_like(length, PROMPT), np.tile(np.int32(STOP), (len(rows), 1)))


def rows_of(count: int, vocab: int, name: str) -> policy.Policy:
    """One policy for all rows, float64."""
    return policy.make(count, vocab, **policies(vocab)[name])


def one_by_one(logits: np.ndarray, options: dict, forgetful: bool = False) -> np.ndarray:
    """The library's laws, a single node a call, what was drafted before it in the history."""
    count, vocab = logits.shape
    text = history([() if forgetful else text for text in texts(vocab)])
    root = np.take_along_axis(text.tokens, text.length[:, None] - 1, axis=1)
    with jax.enable_x64(True):
        settings = policy.make(count, vocab, **options)
        return np.exp(apply(settings, text, root, tree.chain(count, 1), logits[:, None]))[:, 0]


def whole_chains(logits: np.ndarray, options: dict) -> np.ndarray:
    """The library's laws at all nodes of every chain of drafts, from one call."""
    vocab = logits.shape[1]
    chains = list(itertools.product(range(vocab), repeat=DRAFTS))
    at = np.array([[place(vocab, chain[:n]) for n in range(DRAFTS + 1)] for chain in chains])
    nodes = np.insert(np.int32(chains), 0, TEXT[-1], axis=1)
    with jax.enable_x64(True):
        settings = policy.make(len(chains), vocab, **options)
        found = np.exp(
            apply(settings, history([()] * len(chains)), nodes, tree.chain(*nodes.shape), logits[at])
        )
    law = np.full_like(logits, np.nan)
    law[at] = found
    assert np.abs(law[at] - found).max() < 1e-15  # later nodes change nothing
    return law


def slow(logits: np.ndarray, options: dict) -> np.ndarray:
    rows = zip(texts(logits.shape[1]), logits, strict=True)
    laws = [
        slow_policy.slow(options, np.array(TEXT + text), PROMPT, np.array(STOP), row) for text, row in rows
    ]
    return np.exp(laws)


def law_of(law: np.ndarray) -> exact.Law:
    return lambda text: law[place(law.shape[1], text)]


def sampled(q: np.ndarray, stated: np.ndarray | None = None) -> list[exact.Draft]:
    """Every chain, also those that never come (so that shapes stay), and the law stated for its tokens."""
    vocab, parent = q.shape[1], tuple(range(-1, DRAFTS))
    drafts = []
    for chain in itertools.product(range(vocab), repeat=DRAFTS):
        above = [place(vocab, chain[:n]) for n in range(DRAFTS)]
        laws = (q if stated is None else stated)[[0, *above]]  # the root's is not looked at
        drafts.append(exact.Draft(np.prod(q[above, chain]), (0, *chain), parent, DRAFTS + 1, laws))
    return drafts


def points(q: np.ndarray) -> list[exact.Draft]:
    """Every chain as point masses, whatever q: any mixture of them must keep the target's law."""
    drafts = sampled(q)
    weights = np.random.default_rng(1).dirichlet(np.ones(len(drafts)))
    return [draft._replace(weight=w, q=None) for draft, w in zip(drafts, weights, strict=True)]


def error(rule, p: np.ndarray, drafts: list[exact.Draft], wanted: np.ndarray) -> float:
    """How far the rule, given p, takes the text from the wanted law."""
    made = exact.output(rule, law_of(p), drafts, DRAFTS + 1, tail=law_of(wanted)).law
    return exact.distance(made, exact.target_law(law_of(wanted), DRAFTS + 1))


AT_0 = tuple(name for name in POLICIES if name.endswith("temperature 0"))
PAIRS = [(rule, name) for rule in (token, block) for name in POLICIES] + [(greedy, name) for name in AT_0]


@pytest.mark.parametrize("drafter", [sampled, points], ids=lambda drafter: drafter.__name__)
@pytest.mark.parametrize(("rule", "name"), PAIRS, ids=[f"{rule.name}-{name}" for rule, name in PAIRS])
def test_the_law_is_the_targets(rule, name, drafter):
    for kind, logits in INSTANCES.items():
        options = policies(logits.p.shape[1])[name]
        drafts = drafter(one_by_one(logits.q, options))
        assert sum(draft.weight for draft in drafts) == pytest.approx(1, abs=1e-12)
        p, wanted = whole_chains(logits.p, options), slow(logits.p, options)
        assert error(rule, p, drafts, wanted) < 1e-12, kind


def root_only(logits: Tables, options: dict):
    """p has the penalties of the root at all nodes."""
    return one_by_one(logits.p, options, forgetful=True), sampled(one_by_one(logits.q, options))


def unpenalised_q(logits: Tables, options: dict):
    """Drafts drawn with the policy come with the law of the bare logits."""
    q = one_by_one(logits.q, options)
    return whole_chains(logits.p, options), sampled(q, stated=one_by_one(logits.q, {}))


def truncated_first(logits: Tables, options: dict):
    """p is cut off before the temperature, q after it."""
    p = whole_chains(logits.p, options | dict(temperature=1.0)) ** (1 / options["temperature"])
    return p / p.sum(-1, keepdims=True), sampled(one_by_one(logits.q, options))


PENALTIES = ("repetition", "presence", "frequency", "min_new_tokens", "all")
MUTANTS = [(root_only, name) for name in PENALTIES]
MUTANTS += [(unpenalised_q, name) for name in PENALTIES]
MUTANTS += [(truncated_first, "temperature 2 and top-p")]


@pytest.mark.parametrize("rule", [token, block], ids=lambda rule: rule.name)
@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=[f"{m.__name__}-{name}" for m, name in MUTANTS])
def test_a_mutant_is_found(mutant, name, rule):
    logits, options = INSTANCES["random"], policies(4)[name]
    assert error(rule, *mutant(logits, options), slow(logits.p, options)) > 0.01


class Place(NamedTuple):
    """The cache of a model that looks its logits up in a table, its params."""

    at: jax.Array
    following: jax.Array  # scratch
    length: jax.Array


def lookup(vocab: int) -> Model:
    def forward(table, cache, tokens, layout):
        following = cache.at * vocab + tokens[:, 0] + 1
        return following[:, None, None], None, cache._replace(following=following)

    def commit(cache, path, count):
        return Place(cache.following, cache.following, cache.length + count)

    return Model(lambda *sizes: None, forward, commit, lambda table, at: table[at[:, :, 0]], vocab, 99)


ROWS, VOCAB = 2000, 4
KEYS = keys.row_keys(range(ROWS), ROWS)
DRAFTER = model(lookup(VOCAB), DRAFTS)
propose, judge = jax.jit(DRAFTER.propose), jax.jit(verify, static_argnums=(0, 5))


def propose_all(name: str, logits: np.ndarray) -> Proposal:
    """A draft model's proposals, one for each key of the coupled rule."""
    zero = jnp.zeros(ROWS, jnp.int32)
    state = Draft(Place(zero, zero, zero), jnp.broadcast_to(logits[0], (ROWS, VOCAB)))
    offset, settings = zero + POSITION, rows_of(ROWS, VOCAB, name)
    context = Context(offset, settings, history([()] * ROWS), keys.coupled_keys(KEYS), offset)
    return propose(logits, state, zero + TEXT[-1], context)[0]


def places(tokens: np.ndarray) -> np.ndarray:
    """Of the nodes of chains of drafts."""
    return np.array([[place(VOCAB, tuple(row[1 : n + 1])) for n in range(DRAFTS + 1)] for row in tokens])


@pytest.mark.parametrize("name", POLICIES)
def test_a_draft_model_states_these_laws(name):
    logits = INSTANCES["random"].q
    with jax.enable_x64(True):
        made = jax.device_get(propose_all(name, logits))
    q = one_by_one(logits, policies(VOCAB)[name])
    above = places(made.tokens)[:, :-1]
    np.testing.assert_allclose(np.exp(made.logq[:, 1:]), q[above], rtol=0, atol=1e-15)
    assert (q[above, made.tokens[:, 1:]] > 0).all()


def complete_tree() -> Proposal:
    """Every text of two tokens: node i is place i."""
    short = [text for text in texts(VOCAB) if len(text) <= 2]
    tokens = jnp.asarray([0 if not text else text[-1] for text in short], jnp.int32)
    parent = (jnp.arange(len(short)) - 1) // VOCAB
    each = [jnp.broadcast_to(x, (ROWS, len(short))) for x in (tokens, parent)]
    return Proposal(each[0], tree.from_parents(each[1]), jnp.full(ROWS, len(short)))


def plain(rule, law: np.ndarray) -> np.ndarray:
    """The text that plain decoding draws from the laws with each row's noise."""
    text, at = [], np.zeros(ROWS, int)
    for position in range(POSITION + 1, POSITION + DRAFTS + 2):
        noise = jax.vmap(lambda key, at: keys.coupled_noise(key, at, VOCAB, jnp.float64), (0, None))
        weights = law[at] + (noise(keys.coupled_keys(KEYS), position) if rule.coupled else 0)
        text.append(np.argmax(weights, axis=1))
        at = at * VOCAB + text[-1] + 1
    return np.stack(text, axis=1)


def emitted(rule, name: str, proposal: Proposal, logits: np.ndarray, depth: int):
    """The text of one round, [ROWS, depth + 1], and how much of it was written."""
    laws = apply(rows_of(ROWS, VOCAB, name), history([()] * ROWS), proposal.tokens, proposal.tree, logits)
    verdict = judge(rule, KEYS, jnp.full(ROWS, POSITION), proposal, laws, depth)
    path, accepted, following, ok = jax.device_get(verdict)
    assert ok.all()
    text = np.take_along_axis(np.asarray(proposal.tokens), path, axis=1)
    text = np.roll(text, -1, axis=1)
    text[np.arange(ROWS), accepted] = following
    return text, accepted + 1


COINLESS = [(coupled, name) for name in POLICIES] + [(greedy, name) for name in AT_0]


@pytest.mark.parametrize("growth", ["chain", "tree"])
@pytest.mark.parametrize(("rule", "name"), COINLESS, ids=[f"{rule.name}-{name}" for rule, name in COINLESS])
def test_rules_without_coins_write_the_plain_text(rule, name, growth):
    logits = INSTANCES["random"]
    law = slow(logits.p, policies(VOCAB)[name])
    with jax.enable_x64(True), np.errstate(divide="ignore"):
        proposal = propose_all(name, logits.q) if growth == "chain" else complete_tree()
        tokens = np.asarray(proposal.tokens)
        at = (
            places(tokens) if growth == "chain" else np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        )
        depth = DRAFTS if growth == "chain" else 2
        text, count = emitted(rule, name, proposal, logits.p[at], depth)
        wanted = plain(rule, np.log(law))[:, : depth + 1]
    written = np.arange(depth + 1) < count[:, None]
    assert (text == wanted)[written].all()
    assert growth == "chain" or written.all()  # the tree has every text
