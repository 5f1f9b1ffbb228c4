"""The heads of Medusa (arXiv 2401.10774): head m guesses the token m + 2 places after its feature.

    y = x + silu(W x + b), once for each block;  logits = y U

x is the target's state after its final norm, whose own head gives the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.models.decoder import FINAL, linear_weights, project
from jspec.models.heads import Heads
from jspec.models.layers import Weight, head_logits
from jspec.once import built_once
from jspec.types import Params


@dataclass(frozen=True)
class Config:
    """What the heads are made of; W is the number of rows of each U in the file."""

    hidden_size: int
    vocab_size: int  # W
    heads: int  # M
    blocks: int  # of each head
    bias: bool = True
    own_heads: int | None = None  # how many U the file has: one may serve all, or none; None: M


def weights(config: Config, linear: str, head: str) -> dict[str, Any]:
    """Describe the tensors; the names are formats of the head {i} and the block {j}."""
    hidden_size = config.hidden_size

    def block(i: int, j: int) -> dict[str, Weight]:
        return linear_weights(
            "w", linear.format(i=i, j=j), (hidden_size, hidden_size), ("embed", "embed"), config.bias
        )

    own = config.heads if config.own_heads is None else config.own_heads
    return {
        "blocks": [[block(i, j) for j in range(config.blocks)] for i in range(config.heads)],
        "heads": [
            {
                "head": Weight(
                    (hidden_size, config.vocab_size), ("embed", "vocab"), f"{head.format(i=i)}.weight", True
                )
            }
            for i in range(own)
        ],
    }


@built_once
def make(config: Config) -> Heads:
    """Build the `Heads` of a config.

    Params: ``blocks`` of each head, ``heads`` (dicts with ``head`` or ``rows``; one alone
    serves all), and ``ids`` where the heads have a vocabulary of their own.
    """

    def forward(params: Params, features: Array) -> Array:
        def logits(index: int) -> Array:
            x = features
            for block in params["blocks"][index]:
                x = x + jax.nn.silu(project(block, "w", x))
            return head_logits(params["heads"][index % len(params["heads"])], x)

        return jnp.stack([logits(index) for index in range(config.heads)], axis=2)

    return Heads(
        forward=forward,
        count=config.heads,
        vocab_size=config.vocab_size,
        feature_size=config.hidden_size,
        feature_layers=(FINAL,),
    )
