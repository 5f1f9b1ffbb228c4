"""The coupled verifier: the next token is ``argmax(log p + g)``, g the Gumbel noise of row and position."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int, UInt32

from jspec.sampling import keys
from jspec.sampling.verifiers.greedy import argmax_alone, is_argmax
from jspec.types import Verifier


def _with_noise(
    row_key: UInt32[Array, "2"], position: Int[Array, "M"], logp: Float[Array, "M V"]
) -> Float[Array, "M V"]:
    key = keys.coupled_keys(row_key)
    return logp + jax.vmap(lambda at: keys.coupled_noise(key, at, logp.shape[1], logp.dtype))(position)


coupled = Verifier("coupled", is_argmax, argmax_alone, _with_noise, random=False, coupled=True)
"""Draws from p, and keeps a draft iff it is this very draw.

So the text depends on the row's key alone, not on the drafter or on how far it drafts; with no
draft at all it is the same text. ``logq`` is not used. A draft ``argmax(log q + g)`` with the
same noise is kept with probability Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i).
(Daliri, Musco, Suresh: Coupling without communication and drafter-invariant speculative
decoding, arXiv 2408.07978)."""
