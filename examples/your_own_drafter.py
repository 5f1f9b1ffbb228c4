"""A drafter of your own, with params: after each token the one that followed it most often in a text.

    python examples/your_own_drafter.py --target smollm2 --corpus my_text.txt

It is written outside the library, used by `jspec.generate`, and certified: greedy text with it is the plain
text, and the whole loop at temperature writes the target's distribution.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jspec
from jspec import Context, Drafter, Emitted, Proposal, certify, tree
from jspec.certify.tiny import tiny

CORPUS = "the cat sat on the mat and the dog sat on the cat and the mat sat on the dog. " * 4


@jspec.built_once  # so that the same K, written twice, is one compiled program
def successor(num_speculative_tokens: int) -> Drafter:
    """K tokens, each the successor of the one before. Params: Int[V], -1 where none is known."""
    depth = num_speculative_tokens

    # A table needs no state; what a drafter that reads the text keeps is shown by jspec.drafters.bigram.
    def init(params: Array, batch: int, slots: int, scratch: int) -> tuple[()]:
        return ()

    def absorb(params: Array, state: tuple[()], emitted: Emitted) -> tuple[()]:
        return ()

    def propose(params: Array, state: tuple[()], root: Array, context: Context) -> tuple[Proposal, tuple[()]]:
        def follow(token: Array, _: None) -> tuple[Array, Array]:
            token = jnp.where(token < 0, -1, params[token])
            return token, token

        drafts = jax.lax.scan(follow, root, length=depth)[1].T
        tokens = jnp.concatenate([root[:, None], drafts], axis=1)
        count = 1 + jnp.sum(drafts >= 0, axis=1, dtype=jnp.int32)  # a row without a successor ends there
        return Proposal(tokens, tree.chain(*tokens.shape), count), state

    return Drafter(init, absorb, propose, nodes=depth + 1, depth=depth)


def learn(tokens: list[int], vocab_size: int) -> Array:
    """The params: the most frequent successor of each token."""
    pairs, counts = np.unique(np.stack([tokens[:-1], tokens[1:]]), axis=1, return_counts=True)
    successors = np.full(vocab_size, -1, np.int32)
    for at in np.argsort(counts, kind="stable"):  # the most frequent one is written last
        successors[pairs[0, at]] = pairs[1, at]
    return jnp.asarray(successors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--corpus", type=Path, help="a text to learn from")
    parser.add_argument("--prompt", default="the cat sat on")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1000, help="texts of each setting in the χ² test")
    options = parser.parse_args()

    target, drafter = jspec.load(options.target), successor(3)
    corpus = options.corpus.read_text(encoding="utf-8") if options.corpus else CORPUS
    params = learn(target.tokenizer.encode(corpus), target.model.vocab_size)
    answer = jspec.generate(
        options.prompt,
        target=target,
        draft=drafter,
        draft_params=params,
        raw=True,
        max_new_tokens=options.max_new_tokens,
    )
    print(answer.text)
    print(f"accept length {answer.metrics.accept_length:.2f} (bonus counted)")

    prompts = [target.tokenizer.encode(options.prompt)]
    found = certify.greedy_text(
        target.model, target.params, drafter, params, prompts, max_new_tokens=options.max_new_tokens
    )
    print(f"greedy: {found.tokens} tokens equal, {found.faults} faults")
    small = learn([0, 1, 2, 3, 4, 0, 2, 4, 1], 5)
    loop = certify.chi_square(*tiny(0), drafter, small, jspec.verifiers.token, rows=options.rows)
    print(f"χ² of the loop: smallest p-value {min(loop.p_values):.2g}")
    if found.faults or min(loop.p_values) < 1e-6:
        raise SystemExit("it changes the text")


if __name__ == "__main__":
    main()
