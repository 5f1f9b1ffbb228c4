"""Prompt files: every form of a line, and bad lines by their numbers."""

import json

import pytest

from jspec.errors import JspecError
from jspec.text.prompts import read_prompts


def test_every_form_of_a_line(tmp_path):
    message = {"role": "user", "content": "hi"}
    lines = [{"prompt": "a"}, {"turns": ["b", "c"], "question_id": 1}, {"messages": [message]}, "d"]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_prompts(path) == ["a", "b", [message], "d"]
    assert read_prompts(path, 2) == ["a", [message]]


def test_a_text_file_is_one_prompt(tmp_path):
    (tmp_path / "p.txt").write_text("two\nlines")
    assert read_prompts(tmp_path / "p.txt") == ["two\nlines"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n[1]', "line 2: no JSON .*; line 3: the prompt should be a text"),
        ('{"prompt": ""}', "line 1: the prompt should be a text of at least one character"),
        ('{"prompt": "a", "turns": ["b"]}', "line 1: should have one of 'prompt', 'turns' and 'messages'"),
        ('{"question": "a"}', "line 1: should have one of"),
        ("\n" * 3, "holds no prompt"),
        ("7\n" * 12, "line 10: .*; and 2 more"),
    ],
)
def test_bad_lines_are_numbered(tmp_path, content, message):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(JspecError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_unreadable_files(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff")
    with pytest.raises(JspecError, match="is not UTF-8"):
        read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(JspecError, match="cannot read the prompt file"):
        read_prompts(tmp_path / "none.jsonl")
