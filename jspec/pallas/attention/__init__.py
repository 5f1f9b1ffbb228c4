"""Verification attention over a long cache."""
