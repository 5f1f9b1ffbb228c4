"""Model families.

Each is a module with `Config`, ``from_hf(config.json, place="")``, `weights`, `make`, and `DEFAULTS`,
which says what a key means that is missing in the settings of a text part or of a draft head's layers.
"""

from jspec.models import gemma3, llama, mistral, qwen2, qwen3

FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3_text": gemma3,
}
"""``model_type`` of a config.json -> the module that runs it."""
