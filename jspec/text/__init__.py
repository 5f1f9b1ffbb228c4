"""Tokenizers and prompts."""
