"""Params from files, and back: Hugging Face folders, GGUF, Orbax."""
