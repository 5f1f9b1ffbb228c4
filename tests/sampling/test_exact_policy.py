"""The exact distribution of a round under every policy: `distribution.log_probs` and a verifier together.

What `jspec.certify.exact` sums is compared with a slow distribution, made text by text with a
policy of its own; and mutants of the policy must fail.
"""

import functools
import itertools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.certify.exact import (
    CHAIN,
    DRAFT_KINDS,
    DRAFTS,
    INSTANCES,
    POSITION,
    PROMPT,
    STOP,
    TEXT,
    AllProbs,
    apply,
    error,
    history,
    one_by_one,
    places,
    policies,
    sampled,
    texts,
    whole_drafts,
)
from jspec.sampling import keys, policy
from jspec.sampling.drafters.draft_model import DraftState, draft_model
from jspec.sampling.verifiers import VERIFIERS, block, coupled, greedy, token
from jspec.types import Context, Model, Proposal
from tests import oracle
from tests.sampling import slow_policy

VOCAB, (TARGET, DRAFT) = 4, INSTANCES["random"]
POLICIES = tuple(policies(VOCAB))


@functools.cache
def all_probs(kind: str, name: str, parent=CHAIN) -> AllProbs:
    """The library's distributions, but what is wanted is the slow one."""
    p, q = INSTANCES[kind]
    options, after = policies(p.shape[1])[name], zip(texts(p.shape[1]), p, strict=True)
    slow = [slow_policy.slow(options, np.array(TEXT + text), PROMPT, STOP, logits) for text, logits in after]
    return AllProbs(whole_drafts(p, options, parent), one_by_one(q, options), np.exp(slow))


AT_0 = [(greedy, name) for name in POLICIES if name.endswith("temperature 0")]
LOSSLESS = [verifier for verifier in VERIFIERS.values() if verifier.lossless]
RANDOM = [(verifier, name) for verifier in LOSSLESS if verifier.random for name in POLICIES]
COUPLED = [(coupled, name) for name in POLICIES]


def named(value) -> str:
    return value if isinstance(value, str) else getattr(value, "name", None) or value.__name__


CORE = ("neutral", "top-p", "min_new_tokens", "all", "all at temperature 0")
"""By default; each of the others is one setting of "all" alone, and slow."""


def marked(name: str, *values, quick: bool = False):
    marks = [pytest.mark.quick] if quick else [] if name in CORE else [pytest.mark.slow]
    return pytest.param(*values, marks=marks, id="-".join(map(named, values)))


LEGAL = [
    marked(name, verifier, name, drafts, quick=name == "all" and drafts in ("sampled chain", "points tree"))
    for verifier, name in RANDOM + AT_0
    for drafts, kind in DRAFT_KINDS.items()
    if kind.growth in verifier.growths
]


@pytest.mark.parametrize(("verifier", "name", "drafts"), LEGAL)
def test_the_distribution_is_the_targets(verifier, name, drafts):
    _, parent, drafter = DRAFT_KINDS[drafts]
    for kind in INSTANCES:
        p, q, wanted = all_probs(kind, name, parent)
        drafts = drafter(q)
        assert sum(draft.weight for draft in drafts) == pytest.approx(1, abs=1e-12)
        assert error(verifier, p, drafts, wanted) < 1e-12, kind


def root_only(options: dict, right: AllProbs):
    """p has the penalties of the root at all nodes."""
    return one_by_one(TARGET, options, forgetful=True), sampled(right.q)


def unpenalised_q(options: dict, right: AllProbs):
    """Drafts drawn with the policy come with the distribution of the bare logits."""
    return right.p, sampled(right.q, stated=one_by_one(DRAFT, {}))


def truncated_first(options: dict, right: AllProbs):
    """p is cut off before the temperature, q after it."""
    p = whole_drafts(TARGET, options | dict(temperature=1.0)) ** (1 / options["temperature"])
    return p / p.sum(-1, keepdims=True), sampled(right.q)


PENALTIES = ("repetition", "presence", "frequency", "min_new_tokens", "all")
MUTANTS = [*itertools.product((root_only, unpenalised_q), PENALTIES), (truncated_first, "hot top-p")]


@pytest.mark.parametrize("verifier", [token, block], ids=named)
@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=named)
def test_a_mutant_is_found(mutant, name, verifier):
    right = all_probs("random", name)
    p, drafts = mutant(policies(VOCAB)[name], right)
    assert error(verifier, p, drafts, right.wanted) > 0.01


Place = namedtuple("Place", "at following length")  # the cache of the model below; `following` is scratch


def forward(table, cache, tokens, layout):
    # The rows of a chain in several passes stand behind each other.
    above = jnp.where(layout.depth[:, 0] > 0, cache.following, cache.at)
    following = above * VOCAB + tokens[:, 0] + 1
    return following[:, None, None].astype(float), None, cache._replace(following=following)


LOOKUP = Model(  # its params are the table of logits
    init_cache=lambda batch, slots, scratch: None,
    forward=forward,
    commit=lambda cache, path, count: Place(cache.following, cache.following, cache.length + count),
    unembed=lambda table, hidden: table[hidden[:, :, 0].astype(int)],
    vocab_size=VOCAB,
    context_length=99,
)
ROWS = 1000
KEYS = keys.row_keys(range(ROWS), ROWS)
make_noise = jax.jit(jax.vmap(lambda key, at: keys.coupled_noise(key, at, VOCAB, jnp.float64), (0, None)))
propose, judge = jax.jit(draft_model(LOOKUP, DRAFTS).propose), jax.jit(oracle.judge, static_argnums=(0, 5))


def by_the_draft_model(name: str) -> Proposal:
    """What a draft model proposes for each row, with the noise of the coupled verifier."""
    zero = jnp.zeros(ROWS, jnp.int32)
    state = DraftState(Place(zero, zero, zero), jnp.broadcast_to(DRAFT[0], (ROWS, VOCAB)))
    settings, at = policy.make(ROWS, VOCAB, **policies(VOCAB)[name]), zero + POSITION
    context = Context(at, settings, history([()] * ROWS), keys.coupled_keys(KEYS), at)
    return jax.device_get(propose(DRAFT, state, zero + TEXT[-1], context)[0])


def complete_tree(name: str) -> Proposal:
    """Every text of one or two tokens."""
    tokens = np.int32([TEXT[-1], *(text[-1] for text in texts(VOCAB)[1:] if len(text) <= 2)])
    parent = (np.arange(len(tokens)) - 1) // VOCAB
    tokens, parent = (jnp.broadcast_to(x, (ROWS, len(tokens))) for x in (tokens, parent))
    return Proposal(np.asarray(tokens), jax.jit(tree.from_parents)(parent), jnp.full(ROWS, tokens.shape[1]))


@pytest.mark.parametrize("name", [marked(name, name) for name in POLICIES])
def test_a_draft_model_draws_from_these_distributions(name):
    with jax.enable_x64(True):
        made = by_the_draft_model(name)
    q, above = all_probs("random", name).q, places(made.tokens, made.tree, VOCAB)[:, :-1]
    np.testing.assert_allclose(np.exp(made.logq[:, 1:]), q[above], rtol=0, atol=1e-15)
    assert (q[above, made.tokens[:, 1:]] > 0).all()


def plain(verifier, probs: np.ndarray) -> np.ndarray:
    """The text that plain decoding writes, token by token."""
    text, at = [], np.zeros(ROWS, int)
    for position in range(POSITION + 1, POSITION + DRAFTS + 2):
        noise = make_noise(keys.coupled_keys(KEYS), jnp.array(position)) if verifier.coupled else 0
        text.append(np.argmax(np.log(probs[at]) + noise, axis=1))
        at = at * VOCAB + text[-1] + 1
    return np.stack(text, axis=1)


@pytest.mark.parametrize("drafter", [by_the_draft_model, complete_tree], ids=named)
@pytest.mark.parametrize(
    ("verifier", "name"), [marked(name, verifier, name) for verifier, name in COUPLED + AT_0]
)
def test_verifiers_without_uniforms_write_the_plain_text(verifier, name, drafter):
    with jax.enable_x64(True), np.errstate(divide="ignore"):
        proposal = drafter(name)
        settings = policy.make(ROWS, VOCAB, **policies(VOCAB)[name])
        logits = TARGET[places(proposal.tokens, proposal.tree, VOCAB)]
        probs = apply(settings, history([()] * ROWS), proposal.tokens, proposal.tree, logits)
        depth = int(proposal.tree.depth.max())
        verdict = jax.device_get(judge(verifier, KEYS, jnp.full(ROWS, POSITION), proposal, probs, depth))
        slow_distribution = all_probs("random", name).wanted
        wanted = plain(verifier, slow_distribution)[:, : depth + 1]
    text = verdict.tokens
    written = np.arange(depth + 1) <= verdict.accepted[:, None]
    assert verdict.ok.all() and (text == wanted)[written].all()
    assert written.all() or drafter is by_the_draft_model  # the tree has every text
    chance, found = slow_distribution[0], np.bincount(wanted[:, 0], minlength=VOCAB) / ROWS
    assert (np.abs(found - chance) <= 4 * np.sqrt(chance * (1 - chance) / ROWS)).all()
