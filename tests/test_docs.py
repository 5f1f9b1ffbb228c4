"""The documents' Python runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_in_the_documents_runs(block, capsys):
    exec(compile(block, "document", "exec"), {})
    assert capsys.readouterr().out


def test_internal_links_lead_somewhere():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!http|#)([^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
        for name in re.findall(r"`((?:tests|docs|jspec|benchmarks)/[\w/.]+\.(?:py|md))`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
