"""The documents' Python runs as it stands, and every file, function and link that they name is there.

What CONTRIBUTING.md tells people to write is run by `tests/test_extending.py`.
"""

import re

import pytest

from tests.contributing import FILES, ROOT

quick = pytest.mark.quick
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
RUN = [path for path in DOCUMENTS if path.name != "CONTRIBUTING.md"]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in RUN
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]
BY_NAME = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.parametrize("block", BLOCKS)
def test_code_in_the_documents_runs(block, capsys):
    exec(compile(block, "document", "exec"), {})
    assert capsys.readouterr().out


@quick
@BY_NAME
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", prose):
        assert (path.parent / link).exists(), link


@quick
@BY_NAME
def test_files_that_are_named_are_there(path):
    rooms = "tests|docs|jspec|benchmarks|examples|tools"
    for name in re.findall(rf"\b((?:{rooms})/[\w/.]+\.(?:py|md|npz))\b", path.read_text()):
        assert (ROOT / name).exists() or name in FILES, name


def names_of(text):
    """``jspec/decode.py: make_decoder``, as pairs."""
    return re.findall(r"\b(jspec/[\w/]+\.py): (\w+)", text)


@quick
def test_the_diagram_of_the_round_names_what_is_there():
    names = names_of((ROOT / "docs" / "architecture.md").read_text())
    assert len(names) > 20
    for file, name in names:
        assert re.search(rf"^def {name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file}: {name}"


@quick
def test_rooms_and_files_of_the_tables_are_there():
    """Paths in the tables of the architecture are inside the library unless they say otherwise."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`((?:[a-z]\w*/)+(?:\w+\.py)?)`", text):
        assert (ROOT / "jspec" / name).exists() or (ROOT / name).exists(), name


@quick
def test_every_module_stands_in_the_table_of_rooms():
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## Rooms") : text.index("Why the rooms are cut so")]
    for path in (ROOT / "jspec").iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            assert f"`{path.name}`" in table, path.name
        if (path / "__init__.py").exists():
            assert f"`{path.name}/`" in table, path.name


@quick
@BY_NAME
def test_documents_do_not_speak_of_how_they_came_about(path):
    assert not re.search(r"\b(issue|session|helper agent|TODO|FIXME)\b", path.read_text())
