"""N-gram lookup against the search written as loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.sampling.drafters.ngram import lookup, ngram


def slow_lookup(text, count, min_ngram, max_ngram, match):
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        ends = [i for i in range(size - 1, len(text) - 1) if text[i - size + 1 : i + 1] == text[-size:]]
        if ends:
            if match == "most_frequent":
                votes = [sum(text[j + 1] == text[i + 1] for j in ends) for i in ends]
                ends = [i for i, vote in zip(ends, votes, strict=True) if vote == max(votes)]
            copied = list(text)
            for _ in range(count):
                copied.append(copied[ends[-1] + 1 + len(copied) - len(text)])
            return copied[len(text) :]
    return None


@pytest.mark.parametrize("match", ["latest", "most_frequent"])
@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 3), (2, 4)])
def test_lookup_is_the_slow_lookup(min_ngram, max_ngram, match):
    rng = np.random.default_rng(max_ngram)
    length = rng.integers(1, 40, size=300)
    tokens = rng.integers(0, 4, size=(300, 48))

    def row(tokens, length):
        return lookup(tokens, length, 5, min_ngram, max_ngram, match)

    drafts, found = jax.jit(jax.vmap(row))(jnp.array(tokens), jnp.array(length))
    hits = 0
    for i, n in enumerate(length):
        wanted = slow_lookup(tokens[i, :n].tolist(), 5, min_ngram, max_ngram, match)
        assert bool(found[i]) == (wanted is not None)
        if wanted is not None:
            hits += 1
            assert drafts[i].tolist() == wanted
    assert 100 < hits < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_speculative_tokens=0), "num_speculative_tokens = 0 should be a whole number of at least 1"),
        (dict(min_ngram=4, max_ngram=2), "min_ngram 4, max_ngram 2"),
        (dict(min_ngram=0), "min_ngram 0"),
        (dict(match="first"), "'first' should be one of latest, most_frequent"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ngram(**arguments)
