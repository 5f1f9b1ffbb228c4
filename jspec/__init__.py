"""Speculative decoding in JAX, as pure functions: faster text, the same distribution."""

from jspec.decode import Decoder, make_decoder
from jspec.errors import JspecError
from jspec.once import built_once
from jspec.sample import Samples, make_request, speculative_sample
from jspec.sampling import drafters, verifiers
from jspec.sampling.drafters import DraftConfig
from jspec.serve.generate import Generation, Piece, generate
from jspec.serve.target import Target, load
from jspec.types import (
    Context,
    Drafter,
    Emitted,
    History,
    Model,
    Policy,
    Proposal,
    Request,
    State,
    Tree,
    Verifier,
)

__all__ = [
    "Context",
    "Decoder",
    "DraftConfig",
    "Drafter",
    "Emitted",
    "Generation",
    "History",
    "JspecError",
    "Model",
    "Piece",
    "Policy",
    "Proposal",
    "Request",
    "Samples",
    "State",
    "Target",
    "Tree",
    "Verifier",
    "built_once",
    "drafters",
    "generate",
    "load",
    "make_decoder",
    "make_request",
    "speculative_sample",
    "verifiers",
]
