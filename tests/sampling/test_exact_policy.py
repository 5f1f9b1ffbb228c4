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
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.sampling import keys, policy
from jspec.sampling.drafters.model import Draft, model
from jspec.sampling.verify import block, coupled, greedy, token, verify
from jspec.types import Context, Model, Proposal
from tests.sampling import exact, slow_policy

DRAFTS = 3
TEXT, PROMPT, STOP = (0, 2, 0), 1, np.int32([1, -1])  # token 1 is fresh, and ends a row
POSITION = len(TEXT) - 1  # of the root


def policies(vocab: int) -> dict[str, dict]:
    last = vocab - 1
    mixed = dict(top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=1.5, presence_penalty=0.7)
    mixed |= dict(frequency_penalty=-0.5, min_new_tokens=4, logit_bias={0: 1.0, 1: 0.5})
    mixed |= dict(allowed=range(last), banned=(last,))
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

VOCAB, (TARGET, DRAFT) = 4, INSTANCES["random"]
POLICIES = tuple(policies(VOCAB))
apply = jax.jit(policy.apply)


def places(tokens: np.ndarray, layout: tree.Tree, vocab: int) -> np.ndarray:
    """The place of each node of each row."""
    at = np.zeros(tokens.shape, int)
    for node in range(1, tokens.shape[1]):
        above = np.take_along_axis(at, np.asarray(layout.parent[:, node, None]), axis=1)[:, 0]
        at[:, node] = above * vocab + tokens[:, node] + 1
    return at


def history(rows: list[tuple[int, ...]]) -> policy.History:
    """The text up to the root, and then these tokens."""
    tokens = np.zeros((len(rows), len(TEXT) + DRAFTS), np.int32)
    for row, more in zip(tokens, rows, strict=True):
        row[: len(TEXT) + len(more)] = TEXT + more
    length = np.int32([len(TEXT) + len(more) for more in rows])
    return policy.History(tokens, length, np.full_like(length, PROMPT), np.tile(STOP, (len(rows), 1)))


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
    nodes = np.insert(np.int32(chains), 0, TEXT[-1], axis=1)
    with jax.enable_x64(True):
        settings, layout = policy.make(len(chains), vocab, **options), tree.chain(*nodes.shape)
        at = places(nodes, layout, vocab)
        found = np.exp(apply(settings, history([()] * len(chains)), nodes, layout, logits[at]))
    law = np.full_like(logits, np.nan)
    law[at] = found
    assert np.abs(law[at] - found).max() < 1e-15  # what is drafted after a node does not change its law
    return law


Laws = namedtuple("Laws", "p q wanted")  # wanted is what p should be


@functools.cache
def laws(kind: str, name: str) -> Laws:
    p, q = INSTANCES[kind]
    options, after = policies(p.shape[1])[name], zip(texts(p.shape[1]), p, strict=True)
    slow = [slow_policy.slow(options, np.array(TEXT + text), PROMPT, STOP, logits) for text, logits in after]
    return Laws(whole_chains(p, options), one_by_one(q, options), np.exp(slow))


def law_of(law: np.ndarray) -> exact.Law:
    return lambda text: law[place(law.shape[1], text)]


def sampled(q: np.ndarray, stated: np.ndarray | None = None) -> list[exact.Draft]:
    """Every chain, also those that never come (so that shapes stay), with the law stated for its tokens."""
    vocab, parent = q.shape[1], tuple(range(-1, DRAFTS))
    drafts = []
    for chain in itertools.product(range(vocab), repeat=DRAFTS):
        above = [place(vocab, chain[:n]) for n in range(DRAFTS)]
        said = (q if stated is None else stated)[[0, *above]]  # the root's is not looked at
        drafts.append(exact.Draft(np.prod(q[above, chain]), (0, *chain), parent, DRAFTS + 1, said))
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


AT_0 = [(greedy, name) for name in POLICIES if name.endswith("temperature 0")]
RANDOM = [(rule, name) for rule in (token, block) for name in POLICIES]
COUPLED = [(coupled, name) for name in POLICIES]


def named(value) -> str:
    return value if isinstance(value, str) else getattr(value, "name", None) or value.__name__


@pytest.mark.parametrize("drafter", [sampled, points], ids=named)
@pytest.mark.parametrize(("rule", "name"), RANDOM + AT_0, ids=named)
def test_the_law_is_the_targets(rule, name, drafter):
    for kind in INSTANCES:
        p, q, wanted = laws(kind, name)
        drafts = drafter(q)
        assert sum(draft.weight for draft in drafts) == pytest.approx(1, abs=1e-12)
        assert error(rule, p, drafts, wanted) < 1e-12, kind


def root_only(options: dict, right: Laws):
    """p has the penalties of the root at all nodes."""
    return one_by_one(TARGET, options, forgetful=True), sampled(right.q)


def unpenalised_q(options: dict, right: Laws):
    """Drafts drawn with the policy come with the law of the bare logits."""
    return right.p, sampled(right.q, stated=one_by_one(DRAFT, {}))


def truncated_first(options: dict, right: Laws):
    """p is cut off before the temperature, q after it."""
    p = whole_chains(TARGET, options | dict(temperature=1.0)) ** (1 / options["temperature"])
    return p / p.sum(-1, keepdims=True), sampled(right.q)


PENALTIES = ("repetition", "presence", "frequency", "min_new_tokens", "all")
MUTANTS = [*itertools.product((root_only, unpenalised_q), PENALTIES), (truncated_first, "hot top-p")]


@pytest.mark.parametrize("rule", [token, block], ids=named)
@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=named)
def test_a_mutant_is_found(mutant, name, rule):
    right = laws("random", name)
    p, drafts = mutant(policies(VOCAB)[name], right)
    assert error(rule, p, drafts, right.wanted) > 0.01


Place = namedtuple("Place", "at following length")  # the cache of the model below; `following` is scratch


def forward(table, cache, tokens, layout):
    following = cache.at * VOCAB + tokens[:, 0] + 1
    return following[:, None, None].astype(float), None, cache._replace(following=following)


LOOKUP = Model(  # its params are the table of logits
    init_cache=lambda batch, slots, scratch: None,
    forward=forward,
    commit=lambda cache, path, count: Place(cache.following, cache.following, cache.length + count),
    unembed=lambda table, hidden: table[hidden[:, :, 0].astype(int)],
    vocab_size=VOCAB,
    max_length=99,
)
ROWS = 1000
KEYS = keys.row_keys(range(ROWS), ROWS)
make_noise = jax.jit(jax.vmap(lambda key, at: keys.coupled_noise(key, at, VOCAB, jnp.float64), (0, None)))
propose, judge = jax.jit(model(LOOKUP, DRAFTS).propose), jax.jit(verify, static_argnums=(0, 5))


def by_the_draft_model(name: str) -> Proposal:
    """What a draft model proposes for each row, with the noise of the coupled rule."""
    zero = jnp.zeros(ROWS, jnp.int32)
    state = Draft(Place(zero, zero, zero), jnp.broadcast_to(DRAFT[0], (ROWS, VOCAB)))
    settings, at = policy.make(ROWS, VOCAB, **policies(VOCAB)[name]), zero + POSITION
    context = Context(at, settings, history([()] * ROWS), keys.coupled_keys(KEYS), at)
    return jax.device_get(propose(DRAFT, state, zero + TEXT[-1], context)[0])


def complete_tree(name: str) -> Proposal:
    """Every text of one or two tokens."""
    tokens = np.int32([TEXT[-1], *(text[-1] for text in texts(VOCAB)[1:] if len(text) <= 2)])
    parent = (np.arange(len(tokens)) - 1) // VOCAB
    tokens, parent = (jnp.broadcast_to(x, (ROWS, len(tokens))) for x in (tokens, parent))
    return Proposal(np.asarray(tokens), jax.jit(tree.from_parents)(parent), jnp.full(ROWS, tokens.shape[1]))


@pytest.mark.parametrize("name", POLICIES)
def test_a_draft_model_draws_from_these_laws(name):
    with jax.enable_x64(True):
        made = by_the_draft_model(name)
    q, above = laws("random", name).q, places(made.tokens, made.tree, VOCAB)[:, :-1]
    np.testing.assert_allclose(np.exp(made.logq[:, 1:]), q[above], rtol=0, atol=1e-15)
    assert (q[above, made.tokens[:, 1:]] > 0).all()


def plain(rule, law: np.ndarray) -> np.ndarray:
    """The text that plain decoding writes, token by token."""
    text, at = [], np.zeros(ROWS, int)
    for position in range(POSITION + 1, POSITION + DRAFTS + 2):
        noise = make_noise(keys.coupled_keys(KEYS), jnp.array(position)) if rule.coupled else 0
        text.append(np.argmax(np.log(law[at]) + noise, axis=1))
        at = at * VOCAB + text[-1] + 1
    return np.stack(text, axis=1)


@pytest.mark.parametrize("drafter", [by_the_draft_model, complete_tree], ids=named)
@pytest.mark.parametrize(("rule", "name"), COUPLED + AT_0, ids=named)
def test_rules_without_coins_write_the_plain_text(rule, name, drafter):
    with jax.enable_x64(True), np.errstate(divide="ignore"):
        proposal = drafter(name)
        settings = policy.make(ROWS, VOCAB, **policies(VOCAB)[name])
        logits = TARGET[places(proposal.tokens, proposal.tree, VOCAB)]
        law = apply(settings, history([()] * ROWS), proposal.tokens, proposal.tree, logits)
        depth = int(proposal.tree.depth.max())
        verdict = jax.device_get(judge(rule, KEYS, jnp.full(ROWS, POSITION), proposal, law, depth))
        slow_law = laws("random", name).wanted
        wanted = plain(rule, slow_law)[:, : depth + 1]
    kept = np.take_along_axis(proposal.tokens, verdict.path, axis=1)
    text = np.roll(kept, -1, axis=1)  # the root is no news
    text[np.arange(ROWS), verdict.accepted] = verdict.next
    written = np.arange(depth + 1) <= verdict.accepted[:, None]
    assert verdict.ok.all() and (text == wanted)[written].all()
    assert written.all() or drafter is by_the_draft_model  # the tree has every text
    chance, found = slow_law[0], np.bincount(wanted[:, 0], minlength=VOCAB) / ROWS
    assert (np.abs(found - chance) <= 4 * np.sqrt(chance * (1 - chance) / ROWS)).all()
