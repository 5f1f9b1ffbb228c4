"""What is installed: a wheel with the library alone, in an environment without extras."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes

import pytest

from tests.contributing import ROOT

PROGRAM = """
import importlib.metadata
import jax.numpy as jnp
import jspec
from jspec.models import table

assert jspec.__file__.startswith(PREFIX), jspec.__file__
logits = jnp.log(jnp.array([[.1, .9], [.8, .2], [.5, .5]]))
samples = jspec.speculative_sample(
    logits, [[0], [1]], target=table.make(2), drafter=jspec.drafters.ngram(2, min_ngram=1), key=[5, 6],
    max_new_tokens=4, temperature=0,
)
assert samples.tokens.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
for absent in ("transformers", "flax", "orbax", "gguf", "matplotlib", "pytest"):
    try:
        importlib.metadata.version(absent)
    except importlib.metadata.PackageNotFoundError:
        continue
    raise AssertionError(absent)
"""
TYPED = """
import jspec
answer: jspec.Generation = jspec.generate("a")
answers: list[jspec.Generation] = jspec.generate(["a", "b"])
reveal_type(jspec.drafters.ngram(4))
jspec.drafters.ngram("four")
"""


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def pip(*arguments) -> None:
    found = run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)
    assert found.returncode == 0, found.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools builds beside what it packs
    source.mkdir()
    for name in ("jspec", "tests", "tools", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_has_the_library_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (info,) = [name for name in names if name.endswith("/METADATA")]
        metadata = message_from_bytes(file.read(info))
    rooms = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert rooms == {"jspec"} and "jspec/py.typed" in names
    library = {f"jspec/{path.relative_to(ROOT / 'jspec')}" for path in (ROOT / "jspec").rglob("*.py")}
    assert library == {name for name in names if name.endswith(".py")}
    assert metadata["Requires-Python"] == ">=3.11" and "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Keywords"]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A clean environment with the wheel and what it depends on, as the lock has it; no extras."""
    folder = tmp_path_factory.mktemp("clean")
    assert run(sys.executable, "-m", "venv", folder).returncode == 0
    locked = "py311" if sys.version_info < (3, 12) else "py312"
    lock = (ROOT / "requirements" / f"{locked}.txt").read_text().splitlines()
    limits = folder / "limits.txt"
    limits.write_text("".join(f"{line.split()[0]}\n" for line in lock if "==" in line and line[0].isalnum()))
    install = (folder / "bin" / "pip", "--disable-pip-version-check", "install", "--quiet")
    found = run(*install, "--constraint", limits, wheel)
    if found.returncode and run(*install, "--no-deps", "click").returncode:
        pytest.skip("pip finds no packages here")
    assert found.returncode == 0, found.stderr
    return folder


@pytest.mark.slow
def test_it_runs_in_a_clean_environment_without_extras(installed, tmp_path):
    program = PROGRAM.replace("PREFIX", repr(str(installed)))
    found = run(installed / "bin" / "python", "-c", program, cwd=tmp_path)
    assert found.returncode == 0 and found.stderr == "", found.stderr
    found = run(installed / "bin" / "jspec", "--help", cwd=tmp_path)
    assert found.returncode == 0 and "generate" in found.stdout
    found = run(installed / "bin" / "jspec", "generate", "--prompt", "a", "--target", tmp_path, cwd=tmp_path)
    assert found.returncode == 1 and len(found.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_users_type_checker_sees_the_types(installed, tmp_path):
    (tmp_path / "program.py").write_text(TYPED)
    python = installed / "bin" / "python"
    found = run(sys.executable, "-m", "mypy", "--python-executable", python, "program.py", cwd=tmp_path)
    lines = found.stdout.splitlines()
    assert 'Revealed type is "jspec.types.Drafter"' in lines[0]
    assert len(lines) == 3 and "incompatible type" in lines[1], found.stdout


@pytest.mark.quick
def test_versions_and_extras_are_said_once():
    """Extras that a message or a document names are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"flax", "hf", "orbax", "plot"} == set(project["optional-dependencies"])
    assert (ROOT / project["readme"]).is_file() and not any("License ::" in c for c in project["classifiers"])
