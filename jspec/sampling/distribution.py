"""The target distribution: from logits to the log-probabilities that text is drawn from.

There is one, `log_probs`, for plain decoding, drafting, verifying and the bonus token; drawing
is the caller's. Every setting is a traced array with one entry a row, so requests mix in one
batch and one compiled program serves them all; a part that no row uses is skipped at run time.

The order is that of transformers (``generation/utils.py``, ``_get_logits_processor``):

1. ``bias``: logit bias, allowed and banned tokens;
2. repetition penalty (Keskar et al. 2019; prompt and generated tokens): positive logits
   are divided by it, others multiplied, the bias included;
3. frequency and presence penalty (OpenAI's, as in vLLM; generated tokens only);
4. stop tokens are banned until ``min_new_tokens`` are written;
5. temperature; 0 ends here: all mass on the greatest logit, the lowest id in a tie;
6. top-k, 7. top-p (of what top-k left, renormalised), 8. min-p.

1 to 4 are `BEFORE_TEMPERATURE`, 5 to 8 `jspec.sampling.truncate`; a step of one's own goes into
`BEFORE_TEMPERATURE` or behind all in `AFTER_TEMPERATURE`. A kernel that does not know a step
gives way to plain code in the rounds where a row uses it (`jspec.pallas.verify.fused`).

top-k and top-p cut at a threshold, so **ties stay**: ``top_k=2`` with three equal greatest
logits keeps three. The threshold is exact and found without sorting, one bit a pass, for
order among floats is order among their bits.

A row is an error if its logits hold NaN or +inf or if nothing is left: it comes out all
NaN or all -inf, so that its greatest value is not finite; no step may hide that. -inf in
logits, as of a padded vocabulary, is legal.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.sampling import truncate
from jspec.sampling.policy import neutral
from jspec.sampling.truncate import any_of, each
from jspec.types import History, Policy, Tree


@runtime_checkable
class Apply(Protocol):
    """Change logits, or log-probabilities, ``x``; in rows with neutral settings by nothing.

    ``nodes`` and ``tree`` say what comes before each position, as in `log_probs`.
    """

    def __call__(
        self,
        policy: Policy,
        history: History,
        nodes: Int[Array, "B R"],
        tree: Tree,
        x: Float[Array, "B N V"],
        /,
    ) -> Float[Array, "B N V"]: ...


class Step(NamedTuple):
    """One step of the distribution, and the fields of `Policy` that it reads."""

    fields: tuple[str, ...]
    apply: Apply

    def in_use(self, policy: Policy) -> Bool[Array, ""]:
        """Whether any row has another value than the neutral one."""
        return any_of(*(getattr(policy, name) != neutral(name) for name in self.fields))


def log_probs(
    policy: Policy, history: History, nodes: Int[Array, "B R"], tree: Tree, logits: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """The distribution of the token after each node: normalised log-probabilities, -inf where excluded.

    ``nodes`` are token ids; node 0, the root, is the last token of the history. What
    comes before node i's successor is the history, then i's ancestors below the root, then
    i itself. Of a tree of R nodes the distribution may be asked at N of them: mask [B, N, R].
    float64 logits give float64, all others float32. Everything is traced but shapes and
    whether the tree is a chain. Raises nothing: a bad row comes out as the module says.

    >>> from jspec import tree
    >>> from jspec.sampling.policy import make
    >>> history = History(jnp.array([[2, 0]]), jnp.array([1]), jnp.array([1]), jnp.array([[-1]]))
    >>> logits = jnp.log(jnp.array([[[.4, .1, .5]]]))
    >>> jnp.exp(log_probs(make(1, 3, top_k=2), history, jnp.array([[2]]), tree.chain(1, 1), logits)).tolist()
    [[[0.444, 0.0, 0.556]]]
    """
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    policy = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, policy)
    x = logits.astype(dtype)
    x = jax.lax.cond(
        is_adjusted(policy, history, tree), lambda x: adjust(policy, history, nodes, tree, x), lambda x: x, x
    )
    top = truncate.greatest(x)
    is_sampled = policy.temperature > 0

    def mix(logp: Array) -> Array:
        return jnp.where(each(is_sampled), logp, truncate.greedy(x, top))

    def sampled() -> Array:
        logp = _after_temperature(policy, history, nodes, tree, truncate.sampled(policy, x, top))
        return jax.lax.cond(any_of(~is_sampled), mix, lambda logp: logp, logp)

    return jax.lax.cond(any_of(is_sampled), sampled, lambda: truncate.greedy(x, top))  # all greedy: no exp


def is_adjusted(policy: Policy, history: History, tree: Tree) -> Bool[Array, ""]:
    """Whether `adjust` changes any logit of this round."""
    steps = [step for step in BEFORE_TEMPERATURE if step is not _EARLY_STOP]
    return any_of(_is_early(policy, history, tree), *(step.in_use(policy) for step in steps))


def adjust(
    policy: Policy, history: History, nodes: Int[Array, "B R"], tree: Tree, x: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """Steps 1 to 4: bias, penalties and the ban on early stops."""
    for step in BEFORE_TEMPERATURE:
        x = step.apply(policy, history, nodes, tree, x)
    return x


def _after_temperature(policy: Policy, history: History, nodes: Array, tree: Tree, logp: Array) -> Array:
    for step in AFTER_TEMPERATURE:

        def changed(logp: Array, step: Step = step) -> Array:
            return jax.nn.log_softmax(step.apply(policy, history, nodes, tree, logp), axis=-1)

        logp = jax.lax.cond(step.in_use(policy), changed, lambda logp: logp, logp)
    return logp


def _add_bias(policy: Policy, history: History, nodes: Array, tree: Tree, x: Array) -> Array:
    return x + policy.bias[:, None, :].astype(x.dtype)


def _penalise(policy: Policy, history: History, nodes: Array, tree: Tree, x: Array) -> Array:
    """Repetition, frequency and presence penalties, from counts of each node's own text."""

    def penalised(x: Array) -> Array:
        batch, count, vocab = x.shape
        row = jnp.arange(batch)[:, None]
        slot = jnp.arange(history.tokens.shape[1])
        known = (slot < history.length[:, None]) & (history.tokens >= 0)
        tokens = jnp.where(known, history.tokens, vocab)  # beyond V: dropped
        written = (slot >= history.prompt_length[:, None]).astype(jnp.int32)
        counts = jnp.zeros((batch, 2, vocab), x.dtype).at[row, written, tokens].add(1, mode="drop")
        index = jnp.arange(nodes.shape[1])
        above = index[:, None] >= index if tree.mask is None else tree.mask
        above = jnp.broadcast_to(above & (index > 0), (batch, count, len(index)))  # the history has the root
        generated = jnp.broadcast_to(counts[:, 1:], x.shape)
        drafted = jnp.where(nodes >= 0, nodes, vocab)
        at = row[:, :, None], jnp.arange(count)[:, None], drafted[:, None, :]
        generated = generated.at[at].add(above, mode="drop")
        seen = (counts[:, :1] > 0) | (generated > 0)
        penalty = each(policy.repetition_penalty)
        x = jnp.where(seen, jnp.where(x < 0, x * penalty, x / penalty), x)
        x -= each(policy.frequency_penalty) * generated
        return x - each(policy.presence_penalty) * (generated > 0)

    return jax.lax.cond(_PENALTIES.in_use(policy), penalised, lambda x: x, x)


def _is_early(policy: Policy, history: History, tree: Tree) -> Bool[Array, "B N"]:
    """Where no stop token may follow yet."""
    generated = (history.length - history.prompt_length)[:, None] + tree.depth
    return generated < policy.min_new_tokens[:, None]


def _ban_early_stop(policy: Policy, history: History, nodes: Array, tree: Tree, x: Array) -> Array:
    """Adds, for `where` might hide a NaN."""
    row, stop = jnp.arange(x.shape[0])[:, None], history.stop_token_ids
    stop = jnp.where(stop >= 0, stop, x.shape[-1])  # no wrapping around
    ban = jnp.zeros((x.shape[0], x.shape[-1]), x.dtype).at[row, stop].set(-jnp.inf, mode="drop")
    return x + jnp.where(_is_early(policy, history, tree)[:, :, None], ban[:, None, :], 0)


_PENALTIES = Step(("repetition_penalty", "presence_penalty", "frequency_penalty"), _penalise)
_EARLY_STOP = Step(("min_new_tokens",), _ban_early_stop)

BEFORE_TEMPERATURE: tuple[Step, ...] = (Step(("bias",), _add_bias), _PENALTIES, _EARLY_STOP)
"""Steps on logits, in order."""

TEMPERATURE_TO_MIN_P = ("temperature", "top_k", "top_p", "min_p")
"""The fields that `jspec.sampling.truncate` reads: what a kernel of `jspec.pallas.verify` knows."""

AFTER_TEMPERATURE: tuple[Step, ...] = ()
"""Steps on the log-probabilities that min-p left, in order; each is normalised again."""
