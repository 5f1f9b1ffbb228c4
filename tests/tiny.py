"""A whole Hugging Face folder small enough for any test: a random Llama that writes characters."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

GOLDEN = Path(__file__).parent / "models" / "golden" / "gqa_untied"
ALPHABET = string.ascii_lowercase + string.digits + " .,:;!?()'-+*/=<>\n"
EOS = 63


def folder(path: Path, context: int = 96) -> Path:
    """Model, tokenizer and end-of-text id, ready for ``--target``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, path)
    config = json.loads((path / "config.json").read_text())
    config |= {"eos_token_id": EOS, "max_position_embeddings": context}
    (path / "config.json").write_text(json.dumps(config))
    vocab = {character: index for index, character in enumerate(ALPHABET)}
    vocab |= {f"<{index}>": index for index in range(len(vocab), EOS)} | {"<end>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<62>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    return path
