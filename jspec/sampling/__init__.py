"""Drafting, verifying and the distributions they keep."""
