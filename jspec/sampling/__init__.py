"""Drafting, verifying and the laws they keep."""
