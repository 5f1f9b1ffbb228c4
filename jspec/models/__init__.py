"""Model families. Each has `Config`, `from_hf`, `weights` and `make`."""

from jspec.models import llama

FAMILIES = {"llama": llama}
"""``model_type`` of a config.json -> the module that runs it."""
