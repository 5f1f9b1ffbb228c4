"""Speculative decoding in JAX, as pure functions: faster text, the same law."""
