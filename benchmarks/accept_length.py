"""Accept length against what it should be, for distributions of known overlap.

A target and a draft whose next-token distributions p and q never change, run through the real loop
at temperature 1. Every round is a full one, so tokens a round, the bonus token counted, has
an exact mean. With overlap α = Σ min(p, q) = 1 - TV(p, q) and K drafts it is

* token:   (1 - α^(K+1)) / (1 - α), each draft being kept with probability α;
* coupled: the same with Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i) in place of α;
* block:   1 + Σ_i E[P_i], P_i = min(1, P_{i-1} p(x_i) / q(x_i)), x_i drawn from q: the
  chance that i drafts are kept. Never less than token.

The rows are Markdown; ``off`` is measured over expected, less 1.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decode import make_decoder
from jspec.models import table
from jspec.sampling import keys, policy
from jspec.sampling.drafters.draft_model import draft_model
from jspec.types import Request

VOCAB = 16


def distributions(overlap: float, vocab: int = VOCAB) -> tuple[np.ndarray, np.ndarray]:
    """p, and q = a mixture of p and p backwards, of the given overlap (at least about 0.2)."""
    p = np.exp(-0.4 * np.arange(vocab))
    p /= p.sum()
    other = p[::-1]
    share = (1 - overlap) / (1 - np.minimum(p, other).sum())
    if share > 1:
        raise ValueError(f"overlap {overlap} is too small for these distributions")
    return p, (1 - share) * p + share * other


def geometric(accept: float, k: int) -> float:
    """Tokens a round when each of K drafts in turn is kept with the same probability."""
    return float(sum(accept**i for i in range(k + 1)))


def expected(verifier: str, p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The exact mean of tokens a round."""
    if verifier == "token":
        return geometric(float(np.minimum(p, q).sum()), k)
    if verifier == "coupled":
        ratio = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
        return geometric(float((1 / ratio.sum(axis=1)).sum()), k)
    reach, chance, total = np.ones(1), np.ones(1), 1.0
    for _ in range(k):
        reach = np.minimum(reach[:, None] * (p / q), 1.0).round(12).ravel()
        chance = (chance[:, None] * q).ravel()
        reach, place = np.unique(reach, return_inverse=True)  # paths that lead to the same P_i
        chance = np.bincount(place.ravel(), chance)
        total += float(reach @ chance)
    return total


def measure(
    verifier: str, p: np.ndarray, q: np.ndarray, k: int, tokens: int, rows: int = 2048
) -> tuple[float, int]:
    """Tokens a round over at least so many tokens, all rounds full; and how many there were."""
    rounds = -(-int(tokens / expected(verifier, p, q, k) * 1.02) // rows)
    model = table.make(len(p))
    decoder = make_decoder(model, draft_model(model, k), verifier, chunk=1)
    params, draft_params = (jnp.broadcast_to(jnp.log(jnp.asarray(x)), (len(p) + 1, len(p))) for x in (p, q))
    limit = 2 + rounds * (k + 1)
    request = Request(
        tokens=jnp.zeros((rows, limit + k + 1), jnp.int32),
        length=jnp.ones((rows,), jnp.int32),
        max_length=jnp.full((rows,), limit),
        stop_token_ids=jnp.full((rows, 1), -1),
        policy=policy.make(rows, len(p)),
        key=keys.row_keys(range(rows), rows),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state):
        return jax.lax.fori_loop(
            0, rounds, lambda _, state: decoder.step(params, draft_params, state)[0], state
        )

    state = run(decoder.init(params, draft_params, request))
    written = int((state.length - state.prompt_length).sum())
    return written / int(state.stats.rounds.sum()), written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, help="for each row of the table")
    parser.add_argument("--overlaps", default="0.5,0.7,0.9")
    parser.add_argument("--num-speculative-tokens", default="4,8", metavar="K,K")
    parser.add_argument("--verifiers", default="token,block,coupled")
    options = parser.parse_args()
    print("| verifier | overlap | K | tokens | measured | expected | off |\n|---|---|---|---|---|---|---|")
    for verifier in options.verifiers.split(","):
        for overlap in map(float, options.overlaps.split(",")):
            for k in map(int, options.num_speculative_tokens.split(",")):
                p, q = distributions(overlap)
                mean, measured = expected(verifier, p, q, k), measure(verifier, p, q, k, options.tokens)
                off = f"{measured[0] / mean - 1:+.2%}"
                row = verifier, overlap, k, measured[1], f"{measured[0]:.4f}", f"{mean:.4f}", off
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
