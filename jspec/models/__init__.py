"""Model families. Each has `Config`, `from_hf`, `weights` and `make`."""

from jspec.models import gemma3, llama, mistral, qwen2, qwen3

FAMILIES = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma3_text": gemma3}
"""``model_type`` of a config.json -> the module that runs it."""
