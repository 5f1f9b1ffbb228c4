"""Fused verification: two passes over the vocabulary instead of arrays of probabilities."""
