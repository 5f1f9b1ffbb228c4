"""The layering and the one host read, checked on the source; and what `import jspec` loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]

# A module imports from its own row and from earlier ones, never in a circle. Names without a
# star are listed before patterns that cover them.
LAYERS = (
    ("jspec.types", "jspec.errors", "jspec.files", "jspec.once"),
    ("jspec.tree", "jspec.ragged", "jspec.cache", "jspec.cache.*"),
    (
        "jspec.models",
        "jspec.models.*",
        "jspec.sampling",
        "jspec.sampling.keys",
        "jspec.sampling.policy",
        "jspec.sampling.truncate",
        "jspec.sampling.distribution",
    ),
    ("jspec.sampling.siblings", "jspec.sampling.grow"),
    ("jspec.sampling.verifiers", "jspec.sampling.verifiers.*"),
    ("jspec.sampling.walk",),
    ("jspec.sampling.drafters", "jspec.sampling.drafters.*"),
    ("jspec.pallas", "jspec.pallas.*"),
    ("jspec.sharding", "jspec.sharding.*"),
    ("jspec.rounds",),
    ("jspec.decode",),
    ("jspec.sample",),
    ("jspec.text", "jspec.text.*"),
    (
        "jspec.weights",
        "jspec.weights.base",
        "jspec.weights.gguf",
        "jspec.weights.huggingface",
        "jspec.weights.multimodal",
        "jspec.weights.orbax",
        "jspec.weights.smollm2",
    ),
    ("jspec.weights.load",),
    ("jspec.weights.convert", "jspec.weights.heads", "jspec.weights.heads.*"),
    ("jspec.serve", "jspec.serve.*"),
    ("jspec",),
    ("jspec.bench", "jspec.bench.*", "jspec.certify", "jspec.certify.*"),
    ("jspec.cli", "jspec.cli.*"),
)

# (who, may not import, except for)
FORBIDDEN = (
    ("jspec.decode", ("jspec.sampling.drafters*", "jspec.models*", "jspec.cache*", "jspec.pallas*"), ()),
    ("jspec.rounds", ("jspec.sampling.drafters*", "jspec.models*", "jspec.cache*", "jspec.pallas*"), ()),
    ("jspec.sampling.drafters.*", ("jspec.sampling.drafters*", "jspec.models*"), ("jspec.models.heads",)),
)

# The functions that may read device arrays, as (module, function).
HOST_READS = {("serve.stream", "fetch"), ("decode", "check_request")}
DEVICE_SIDE = (
    "jspec.decode",
    "jspec.rounds",
    "jspec.serve.stream",
    "jspec.cache.dense",
    "jspec.sampling*",
    "jspec.models*",
)
READ_CALLS = {"numpy.asarray", "numpy.array", "jax.device_get"}
READ_METHODS = {"item", "tolist"}
# Converting a traced value reads it too; elsewhere these words convert plain settings.
CONVERSIONS = {"int", "float", "bool"}
CONVERSIONS_FORBIDDEN = ("jspec.decode", "jspec.sampling*")

TOO_HEAVY = "torch transformers tokenizers orbax flax gguf click rich matplotlib".split()
TOO_HEAVY += ["jax.experimental.pallas"]


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def sources() -> dict[str, str]:
    """Every module of the library and its text."""
    result = {}
    for path in sorted((ROOT / "jspec").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return result


def layer(module: str) -> int | None:
    """The layer that lists the name itself, or else a pattern that covers it."""
    for names in (lambda row: module in row, lambda row: matches(module, row)):
        for index, row in enumerate(LAYERS):
            if names(row):
                return index
    return None


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The modules of jspec that a file imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "jspec")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            base = node.module or ""
            if base.split(".")[0] == "jspec":
                submodules = (f"{base}.{alias.name}" for alias in node.names)
                yield from (name if name in known else base for name in submodules)


def import_faults(module: str, text: str, known: set[str]) -> list[str]:
    """What a module imports against the rules."""
    own = layer(module)
    if own is None:
        return [f"{module} has no layer: put it into LAYERS of tests/test_imports.py, as low as it may go"]
    faults = []
    for name in imported(ast.parse(text), known):
        other = layer(name)
        if other is not None and other > own:
            faults.append(f"{module} imports {name}, which is of a higher layer")
        for who, forbidden, allowed in FORBIDDEN:
            if fnmatchcase(module, who) and matches(name, forbidden) and not matches(name, allowed):
                faults.append(f"{module} may not import {name}: it should come in as a value")
    return faults


def host_reads(module: str, text: str) -> list[str]:
    """The calls of a module that may read a device array, outside the allowed functions."""
    tree = ast.parse(text)
    names = {}  # local name -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname or a.name: a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})

    def suspicious(call: ast.Call) -> bool:
        function = call.func
        if isinstance(function, ast.Attribute):
            owner = function.value
            qualified = isinstance(owner, ast.Name) and f"{names.get(owner.id, owner.id)}.{function.attr}"
            return qualified in READ_CALLS or function.attr in READ_METHODS
        if not isinstance(function, ast.Name):
            return False
        if function.id in CONVERSIONS and matches(module, CONVERSIONS_FORBIDDEN):
            return any(not isinstance(argument, ast.Constant) for argument in call.args)
        return names.get(function.id) in READ_CALLS

    def visit(node: ast.AST, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield from visit(child, child.name)
                continue
            allowed = (module.removeprefix("jspec."), function) in HOST_READS
            if isinstance(child, ast.Call) and suspicious(child) and not allowed:
                yield f"{module}:{child.lineno} in {function}: {ast.unparse(child)}"
            yield from visit(child, function)

    return list(visit(tree, "the module"))


def circle(modules: dict[str, str]) -> list[str]:
    """Modules that import each other, the first and the last the same; empty where there are none."""
    edges = {name: sorted(set(imported(ast.parse(text), set(modules)))) for name, text in modules.items()}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in edges.get(name, []):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in edges if (found := visit(name, []))), [])


def test_imports_point_one_way():
    modules = sources()
    faults = [f for module, text in modules.items() for f in import_faults(module, text, set(modules))]
    assert not faults, "\n".join(faults)


def test_there_is_no_circle_and_no_empty_room():
    modules = sources()
    assert not circle(modules)
    for pattern in (name for row in LAYERS for name in row):
        assert any(fnmatchcase(module, pattern) for module in modules), f"nothing is in the room {pattern}"


def test_a_circle_is_found():
    modules = {
        "jspec.weights.a": "from jspec.weights import b",
        "jspec.weights.b": "def f():\n    from jspec.weights.a import x",
    }
    assert circle(modules) == ["jspec.weights.a", "jspec.weights.b", "jspec.weights.a"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("jspec.unheard_of", ""),
        ("jspec.types", "from jspec import tree"),
        ("jspec.tree", "def f():\n    import jspec.decode"),
        ("jspec.text.prompts", "from jspec.weights.base import Tensor"),
        ("jspec.decode", "from jspec.cache import dense"),
        ("jspec.decode", "from jspec.models import llama"),
        ("jspec.decode", "from jspec.sampling.drafters.ngram import make"),
        ("jspec.sampling.drafters.a", "from jspec.sampling.drafters import ngram"),
        ("jspec.sampling.drafters.a", "from jspec.models.llama import make"),
        ("jspec.sampling.drafters.a", "from jspec.models.heads import eagle3"),
        ("jspec.weights.base", "from jspec.weights.heads import load_head"),
    ],
)
def test_a_forbidden_import_is_found(module, text):
    assert import_faults(module, text, set(sources()))


def test_only_one_function_reads_from_the_device():
    found = [
        read
        for module, text in sources().items()
        if matches(module, DEVICE_SIDE)
        for read in host_reads(module, text)
    ]
    assert not found, "these may wait for the device; only HOST_READS should:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nnp.asarray(x)",
        "import numpy\nnumpy.array(x)",
        "from numpy import asarray\nasarray(x)",
        "import jax\njax.device_get(x)",
        "from jax import device_get as get\nget(x)",
        "x.item()",
        "f(x)[0].tolist()",
        "def fetch_more(x):\n    return int(x)",
    ],
)
def test_a_host_read_is_found(text):
    assert host_reads("jspec.decode", text)


def test_what_is_no_host_read():
    assert not host_reads("jspec.serve.stream", "import jax\ndef fetch(x):\n    return jax.device_get(x)")
    assert not host_reads("jspec.decode", "import jax.numpy as jnp\njnp.asarray(x)\nfloat('inf')")
    assert not host_reads("jspec.models.config", "float(x)")


def test_importing_jspec_is_light():
    code = f"import sys, jspec; print([m for m in {TOO_HEAVY} if m in sys.modules])"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert loaded.strip() == "[]"


def test_shapes_are_checked_in_tests():
    from jspec.models.layers import rms_norm

    with pytest.raises(TypeCheckError):
        rms_norm(jnp.zeros((2, 3, 4)), jnp.zeros(5), 1e-6)
