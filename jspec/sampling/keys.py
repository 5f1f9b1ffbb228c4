"""Random keys, one a row and every use of it apart from every other; and drawing with them.

A row's key is kept as raw threefry data, UInt32[2], so that a state is plain arrays. A
use is named by the position of the round's root, a role, and a node of the tree:

    fold_in(fold_in(fold_in(row key, root position), role), node)

The root moves in every round, so no use comes twice, although one position may be
drafted and verified several times: keys by absolute position would repeat after a
rejection, which biases block verification. Nothing depends on the batch, so a row's
text does not change with its neighbours, their order, or a pause.

Only the coupled verifier's noise goes by the absolute position of the token to be drawn:
there the draft and the target are meant to meet the same noise again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from jspec.errors import JspecError

DRAFT, ACCEPT, NEXT = 0, 1, 2
COUPLED = 2**32 - 1
"""Folded in where the other roles have the root position; no position is as great."""

IMPL = "threefry2x32"
WORD = 2**32


def wrap(data: UInt32[Array, "*batch 2"]) -> Array:
    """The typed key, or keys, of raw data."""
    return jax.random.wrap_key_data(data, impl=IMPL)


def row_keys(source: Any, batch: int) -> UInt32[Array, "{batch} 2"]:
    """Keys for the rows of a batch, from one seed a row or from one `jax.random.key`.

    A row's key depends on its own seed, an integer from 0 to 2**64 - 1, and on nothing
    else; given one typed key (of any kind, traced too), row b gets that key folded with b.

    Raises:
        JspecError: not one seed a row, or a seed that is out of range.

    >>> row_keys([7, 2**40], 2).tolist()
    [[0, 7], [256, 0]]
    >>> row_keys(jax.random.key(0), 3).shape
    (3, 2)
    """
    if isinstance(source, jax.Array):
        if not jnp.issubdtype(source.dtype, jax.dtypes.prng_key) or source.ndim:
            raise JspecError(f"a key must be one jax.random.key(...), not {source.dtype}{list(source.shape)}")
        own = jax.vmap(jax.random.fold_in, (None, 0))(source, jnp.arange(batch))
        return jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(own)
    if not isinstance(source, Sequence | np.ndarray) or np.ndim(source) != 1:
        raise JspecError(f"key is {source!r}; it must be jax.random.key(...), or one seed for each row")
    if len(source) != batch:
        raise JspecError(f"{len(source)} seeds were given for {batch} rows: each row needs one")
    try:
        words = [divmod(operator.index(seed), WORD) for seed in source]
    except TypeError:
        raise JspecError(f"the seeds {list(source)!r} should be integers") from None
    for seed, (high, _) in zip(source, words, strict=True):
        if not 0 <= high < WORD:
            raise JspecError(f"seed {seed} is out of range: it must be from 0 to 2**64 - 1")
    return jnp.asarray(words, jnp.uint32).reshape(batch, 2)


def fold(
    row_key: UInt32[Array, "2"], position: Int[Array, ""], role: int, node: Int[Array, ""] | int
) -> Array:
    """The typed key of one use: DRAFT, ACCEPT or NEXT at a node, in the round whose root is at ``position``.

    >>> a, b = (fold(row_keys([7], 1)[0], jnp.array(5), role, 1) for role in (ACCEPT, NEXT))
    >>> bool(jnp.all(jax.random.key_data(a) == jax.random.key_data(b)))
    False
    """
    key = jax.random.fold_in(wrap(row_key), position)
    return jax.random.fold_in(jax.random.fold_in(key, role), node)


def draft_keys(key: UInt32[Array, "B 2"], position: Int[Array, "B"]) -> UInt32[Array, "B 2"]:
    """What a drafter may know of the rows' keys in the round whose roots are at ``position``.

    Node i is to be drawn with ``fold_in(wrap(draft key), i)``. From these keys nobody can
    get to the row's key or to the verifier's: a drafter that shared the noise of NEXT
    would change the distribution of the text.

    >>> draft_keys(row_keys([7, 8], 2), jnp.array([5, 5])).shape
    (2, 2)
    """
    keys = jax.vmap(jax.random.fold_in)(wrap(key), position)
    return jax.random.key_data(jax.vmap(lambda one: jax.random.fold_in(one, DRAFT))(keys))


def coupled_keys(key: UInt32[Array, "*batch 2"]) -> UInt32[Array, "*batch 2"]:
    """What `coupled_noise` is made from: all that a drafter of the coupled verifier needs to know."""
    typed = wrap(key)
    fold_all = jnp.vectorize(lambda one: jax.random.fold_in(one, COUPLED))
    return jax.random.key_data(fold_all(typed))


def coupled_noise(
    coupled_key: UInt32[Array, "2"], position: Int[Array, ""], vocab: int, dtype: DTypeLike = jnp.float32
) -> Float[Array, "{vocab}"]:
    """The Gumbel noise that draft and target share for the token at an absolute position.

    ``vocab`` is the target's: a draft with another vocabulary picks its tokens' entries.

    >>> coupled_noise(coupled_keys(row_keys([7], 1))[0], jnp.array(5), 3).shape
    (3,)
    """
    return gumbel(jax.random.fold_in(wrap(coupled_key), position), vocab, dtype)


def gumbel(key: Array, vocab: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "{vocab}"]:
    """Gumbel noise of a typed key, for ``argmax(log-weights + noise)``.

    As mode "high" of `jax.random.gumbel`, which takes two words an entry: in float32 the plain
    one has 2**23 values, so that of 49152 equally likely tokens two tie for the first place
    in one draw of 200, and the lower id wins.
    """
    if dtype != jnp.float32:
        return jax.random.gumbel(key, (vocab,), dtype, mode="high")
    return gumbel_of_bits(*jax.random.bits(key, (2, vocab), jnp.uint32))


def gumbel_of_bits(high: UInt32[Array, "*V"], low: UInt32[Array, "*V"]) -> Float[Array, "*V"]:
    """Float32 noise from two random words an entry; a kernel that makes the words gets the same.

    -log(-log(1 - u)), where the second word goes below the first one's 23 bits if u is near 0.
    That is `jax.random.gumbel` of mode "high" up to 4e-7; without log1p, which GPU kernels lack.

    >>> gumbel_of_bits(jnp.uint32([1 << 31]), jnp.uint32([0]))
    Array([0.37], dtype=float32)
    """

    def uniform(bits: Array) -> Array:  # in [0, 1)
        one = jax.lax.shift_right_logical(bits, jnp.uint32(9)) | jnp.uint32(0x3F800000)
        return jax.lax.bitcast_convert_type(one, jnp.float32) - 1.0

    first = uniform(high)
    fine = first + (uniform(low) * jnp.float32(2.0**-23) + jnp.float32(2.0**-47))
    u = jnp.where(first >= 0.5, first, fine)
    w = 1.0 - u
    lost = w == 1.0
    below = jnp.log(w) * (u / jnp.where(lost, 1.0, 1.0 - w))  # 1 - w is exact: log1p(-u)
    return -jnp.log(jnp.where(lost, u, -below))


def draw(key: Array, weights: Float[Array, "V"]) -> Int[Array, ""]:
    """One token by its log-weights, of any total; -inf is never drawn.

    >>> draw(jax.random.key(0), jnp.array([-jnp.inf, 0.0, -jnp.inf])).item()
    1
    """
    return best(weights + gumbel(key, weights.shape[0], weights.dtype))


def draw_each(keys: Array, weights: Float[Array, "B V"]) -> Int[Array, "B"]:
    """`draw` for every row; where each has one possible token, as at temperature 0, without noise.

    >>> draw_each(jax.random.split(jax.random.key(0)), jnp.log(jnp.array([[0.0, 1, 0], [1, 0, 0]]))).tolist()
    [1, 0]
    """
    possible = jnp.sum(weights > -jnp.inf, axis=-1)
    return jax.lax.cond(
        jnp.all(possible == 1), lambda keys, weights: best(weights), jax.vmap(draw), keys, weights
    )


def best(weights: Float[Array, "*batch V"], block: int = 128) -> Int[Array, "*batch"]:
    """`jnp.argmax` over the last axis: the best block first, then the best within it.

    XLA's CPU code takes a maximum 10 times faster than an argmax, and fuses it with what
    makes the weights.

    >>> best(jnp.array([[0.0, 3.0, 1.0, 3.0]]), block=2).tolist()
    [1]
    """
    vocab = weights.shape[-1]
    if vocab <= block:
        return jnp.argmax(weights, axis=-1)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, -vocab % block)]
    padded = jnp.pad(weights, padding, constant_values=-jnp.inf)
    blocks = padded.reshape(*weights.shape[:-1], -1, block)
    where = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    within = jnp.take_along_axis(blocks, where[..., None, None], axis=-2)[..., 0, :]
    return where * block + jnp.argmax(within, axis=-1)
