"""The networks of draft heads, and their contracts `Head` and `Heads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from jspec.types import Commit, InitCache, Params, Tree, Unembed


@runtime_checkable
class Fuse(Protocol):
    """What a row takes from the target: features to the head's own stream."""

    def __call__(self, params: Params, features: Float[Array, "B T E"], /) -> Float[Array, "B T D"]: ...


@runtime_checkable
class HeadForward(Protocol):
    """`jspec.types.Forward` with one more input.

    Gives ``hidden``, for `Unembed`, and the stream that a row at the next position takes in
    the target's place.
    """

    def __call__(
        self,
        params: Params,
        cache: Any,
        tokens: Int[Array, "B T"],
        stream: Float[Array, "B T D"],
        tree: Tree,
        /,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Any]: ...


@dataclass(frozen=True, eq=False)
class Head:
    """A draft head that reads the target's features and writes token after token (EAGLE).

    Row j takes the feature f_j and the token x_{j+1}, stands at position j, and its
    logits are for x_{j+2}: the features go with the tokens shifted left by one. The logits
    are over the head's own vocabulary of W ids. Where ``params`` has ``ids`` (Int[W],
    increasing), draft id w is the target's ``ids[w]``; where it has none they are the same.
    """

    init_cache: InitCache
    fuse: Fuse
    forward: HeadForward
    commit: Commit
    unembed: Unembed
    vocab_size: int  # W
    hidden_size: int  # D
    feature_size: int  # E
    feature_layers: tuple[int, ...]  # which of the target's streams make a feature (`decoder.make`)
    context_length: int  # positions the head was made for


@runtime_checkable
class HeadsForward(Protocol):
    """At the feature f_j, head m guesses x_{j+2+m}: logits in float32."""

    def __call__(self, params: Params, features: Float[Array, "B T E"], /) -> Float[Array, "B T M W"]: ...


@dataclass(frozen=True, eq=False)
class Heads:
    """Heads that each guess one token from the same feature and see no other guess (Medusa).

    ``ids`` in the params as in `Head`, but in any order.
    """

    forward: HeadsForward
    count: int  # M
    vocab_size: int  # W
    feature_size: int  # E
    feature_layers: tuple[int, ...]
