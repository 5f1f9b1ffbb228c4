"""Tokenizers, prompts, and the text of tokens as they come.

The tokenizer is one of ``transformers``; nothing here looks at a model.
"""

from __future__ import annotations

import codecs
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jspec.errors import JspecError, optional
from jspec.files import read_json, refuse_pointer

Prompt = str | Sequence[Mapping[str, str]]
"""A text, or messages of a conversation: ``{"role": ..., "content": ...}``."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
BROKEN = "\ufffd"  # what decoding gives for bytes that are not, or not yet, UTF-8
CONTEXT = 16  # tokens to the left that decoding may depend on: 4 for UTF-8, 1 for spaces


def import_transformers() -> ModuleType:
    """The ``transformers`` module, imported late: it takes seconds. `JspecError` if it is not installed."""
    # Without this it advises, on every start, to install PyTorch, which we do not use.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return optional("transformers")


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a Hugging Face folder, without network.

    Raises `JspecError` if the folder has no tokenizer, or one that cannot be read.

    >>> load_tokenizer("no such folder")
    Traceback (most recent call last):
    jspec.errors.JspecError: no such folder has no tokenizer (tokenizer.json or tokenizer.model)
    """
    folder = Path(folder).expanduser()
    found = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise JspecError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model)")
    for name in found:
        refuse_pointer(folder / name)
    transformers = import_transformers()
    config = _model_config(transformers, folder)
    with _without_marks(folder) as clean:
        try:
            auto = transformers.AutoTokenizer
            tokenizer = auto.from_pretrained(clean, config=config, local_files_only=True)
        except Exception as error:  # each kind of broken file fails in its own way
            raise JspecError(f"the tokenizer in {folder} cannot be read: {_one_line(error)}") from error
    tokenizer.name_or_path = str(folder)
    return tokenizer


def _model_config(transformers: ModuleType, folder: Path) -> Any:
    """What the kind of a tokenizer may depend on.

    Were transformers to read config.json itself, a fault in it would be one of the tokenizer.
    """
    path = folder / "config.json"
    content = read_json(path) if path.is_file() else {}
    kind, name, version = (content.get(k) for k in ("model_type", "tokenizer_class", "transformers_version"))
    if version:  # the one key that transformers reads even so
        try:
            optional("packaging.version").parse(version)
        except (TypeError, ValueError):
            raise JspecError(f"{path}: transformers_version = {version!r} is no version") from None
    known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    config = transformers.CONFIG_MAPPING[kind]() if known else transformers.PreTrainedConfig()
    if isinstance(name, str):
        config.tokenizer_class = name
    config.name_or_path = str(folder)
    return config


@contextmanager
def _without_marks(folder: Path) -> Iterator[Path]:
    """The folder, or a temporary one with the same files where JSON has a byte-order mark.

    Neither transformers nor tokenizers reads such files.
    """
    marked = [path for path in folder.glob("*.json") if path.is_file() and _has_mark(path)]
    if not marked:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="jspec-") as name:
        for path in folder.iterdir():
            if path not in marked:
                (Path(name) / path.name).symlink_to(path.absolute())
        for path in marked:
            (Path(name) / path.name).write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
        yield Path(name)


def _has_mark(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def encode_prompt(tokenizer: Any, prompt: Prompt, raw: bool = False) -> list[int]:
    """Token ids of a prompt, in the chat format that the model expects.

    A text counts as one user message. ``raw``, or a tokenizer without a chat template:
    the text as it is, with the special tokens that the tokenizer puts at its start.
    Raises `JspecError` for an empty prompt, or for messages that cannot be formatted.
    """
    if not prompt:
        raise JspecError("the prompt is empty")
    if raw or not tokenizer.chat_template:
        if not isinstance(prompt, str):
            reason = "raw was asked for" if raw else "the tokenizer has no chat template"
            raise JspecError(f"the prompt is a list of messages, but {reason}: give a text")
        ids = tokenizer.encode(prompt)
    else:
        ids = _encode_chat(tokenizer, prompt)
    if not ids:
        raise JspecError(f"the prompt {prompt!r} has no tokens")
    return list(ids)


def stop_token_ids(folder: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text, in order and each once: of generation_config.json, config.json, the tokenizer.

    Raises `JspecError` for a value that is neither an id nor a list of ids.
    """
    ids: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        path = Path(folder).expanduser() / name
        value = _eos(read_json(path)) if path.is_file() else None
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if type(one) is not int or not 0 <= one < 2**31:
                raise JspecError(f"{path}: eos_token_id = {value!r} should be a token id or a list of them")
            ids[one] = None
    if tokenizer.eos_token_id is not None:
        ids[tokenizer.eos_token_id] = None
    return tuple(ids)


def _eos(config: Mapping[str, Any]) -> Any:
    """``eos_token_id``, which multimodal models may have beside the settings of their text part."""
    inner, value = config.get("text_config"), config.get("eos_token_id")
    return inner.get("eos_token_id") if value is None and isinstance(inner, Mapping) else value


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Raise `JspecError` unless each id that both tokenizers have is the same text in both.

    One may have more ids than the other, as models of one family do (padded embeddings,
    added tokens); the ids that differ are named.
    """
    common = range(min(len(target), len(draft)))
    pairs = zip(target.convert_ids_to_tokens(common), draft.convert_ids_to_tokens(common), strict=True)
    differ = [index for index, (ours, theirs) in enumerate(pairs) if ours != theirs]
    if differ:
        some = ", ".join(map(str, differ[:5])) + (", ..." if len(differ) > 5 else "")
        raise JspecError(
            f"the draft has another tokenizer than the target: {len(differ)} of {len(common)} ids are "
            f"other tokens (ids {some}); use a draft of the same family"
        )


def _encode_chat(tokenizer: Any, prompt: Prompt) -> list[int]:
    optional("jinja2")  # transformers needs it here and does not install it
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise JspecError(f"message {index} should have a 'role' and a 'content': {message!r}")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program: it raises what its author chose
        raise JspecError(f"the chat template does not take this prompt: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """What an error says, on one line and not without end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


class Detokenizer:
    """Turns tokens into text as they come, up to the earliest stop string.

    What `push` and `finish` return adds up to ``tokenizer.decode(ids,
    skip_special_tokens=True, clean_up_tokenization_spaces=False)``, cut before the
    earliest stop string, however the ids are grouped into pushes. Text is held back
    while more tokens could change it: half a character, or what may begin a stop string.

    ``stopped``: a stop string was found; later tokens are ignored.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in self._stop):
            raise JspecError(f"stop strings should be texts of at least one character: {self._stop!r}")
        # Dropped here, so that a run of them does not fill the window.
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids: list[int] = []  # every token that counts
        self._window: list[int] = []  # the last of them without special ones: enough to decode the next
        self._shown = 0  # characters of the window's text that were taken
        self._held = ""  # taken, but may begin a stop string
        self._text: list[str] = []  # what push returned
        self.stopped = False

    @property
    def text(self) -> str:
        """All the text that was returned so far."""
        return "".join(self._text)

    @property
    def tokens_used(self) -> int:
        """How many of the pushed tokens make the text: those of a stop string, and after it, do not count."""
        if not self.stopped:
            return len(self._ids)
        text = self.text

        def makes_text(count: int) -> bool:
            return self._decode(self._ids[:count]).startswith(text)

        return bisect_left(range(len(self._ids)), True, key=makes_text)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; return the text that is now certain, possibly none."""
        if self.stopped:
            return ""
        new = []
        for token in map(int, token_ids):
            self._ids.append(token)
            if token not in self._special:
                new.append(self._take(token))
        return self._release("".join(new), final=False)

    def finish(self) -> str:
        """Return what was held back: no more tokens will come. May find a stop string."""
        if self.stopped:
            return ""
        new = self._decode(self._window)[self._shown :]
        self._shown += len(new)
        return self._release(new, final=True)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _take(self, token: int) -> str:
        """Add a token to the window; return the characters that it makes certain."""
        self._window.append(token)
        if BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or ""):
            return ""  # a run of byte tokens is right or wrong as a whole: wait for its end
        certain = self._certain()
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(self._window) > 2 * CONTEXT:
            self._window = self._window[-CONTEXT:]
            self._shown = len(self._certain())
        return new

    def _certain(self) -> str:
        """The window's text without a last character that the next token may complete."""
        return self._decode(self._window).removesuffix(BROKEN)

    def _release(self, new: str, final: bool) -> str:
        """Join held and new text, cut it at a stop string, hold back what may begin one."""
        text = self._held + new
        found = min((at for s in self._stop if (at := text.find(s)) >= 0), default=len(text))
        begun = len(text) if final else min((_begun(text, s) for s in self._stop), default=len(text))
        # A stop string that began earlier and may still end comes before one already found.
        self.stopped = found < len(text) and found <= begun
        end = min(found, begun)
        self._held = "" if self.stopped else text[end:]
        self._text.append(text[:end])
        return text[:end]


def _begun(text: str, stop: str) -> int:
    """Where the text's end begins to be a stop string; the length of the text if it does not."""
    first = max(0, len(text) - len(stop) + 1)
    return next((at for at in range(first, len(text)) if stop.startswith(text[at:])), len(text))
