"""Speculative decoding in JAX, as pure functions: faster text, the same law."""

from jspec.api import Samples, speculative_sample
from jspec.decode import Decoder, make_decoder
from jspec.errors import JspecError
from jspec.generation import Generation, Piece, Target, generate, load

__all__ = [
    "Decoder",
    "Generation",
    "JspecError",
    "Piece",
    "Samples",
    "Target",
    "generate",
    "load",
    "make_decoder",
    "speculative_sample",
]
