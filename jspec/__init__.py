"""Speculative decoding in JAX, as pure functions: faster text, the same law."""

from jspec.api import Generation, Piece, Target, generate, load
from jspec.decode import Decoder, make_decoder, stream
from jspec.errors import JspecError

__all__ = [
    "Decoder",
    "Generation",
    "JspecError",
    "Piece",
    "Target",
    "generate",
    "load",
    "make_decoder",
    "stream",
]
