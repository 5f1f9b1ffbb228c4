"""Instruments of the tests and benchmarks; no part of the library."""
