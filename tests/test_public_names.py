"""`help` of every public name says what it is, has shapes, errors and an example, which pytest runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path

import pytest

import jspec
from jspec import drafters, verifiers
from jspec.errors import JspecError

quick = pytest.mark.quick

PUBLIC = {name: getattr(jspec, name) for name in jspec.__all__ if not inspect.ismodule(getattr(jspec, name))}
BUILDERS = {
    f"{room.__name__.split('.')[-1]}.{name}": getattr(room, name)
    for room in (drafters, verifiers)
    for name in room.__all__
    if inspect.isfunction(getattr(room, name))
}
FUNCTIONS = {name: one for name, one in (PUBLIC | BUILDERS).items() if inspect.isfunction(one)}
CLASSES = {name: one for name, one in PUBLIC.items() if inspect.isclass(one)}
BUILT = {"DraftConfig", "Drafter", "History", "Model", "Policy", "Proposal", "Tree", "Verifier"}
"""The classes of which a user makes values; the others come out of functions."""
FAILS = re.compile(r"raise JspecError|\bpositive\(|\bcheck_legal\(|\bfind_verifier\(")
"""What a function does that may raise."""


def doc(one) -> str:
    return inspect.cleandoc(one.__doc__ or "")


@quick
@pytest.mark.parametrize("name", PUBLIC | BUILDERS)
def test_the_first_line_says_what_it_is(name):
    first = doc((PUBLIC | BUILDERS)[name]).splitlines()[0]
    assert re.match(r"[A-Z]", first) and "." in first and len(first) > 20, first
    assert not re.match(r"(This|Build the drafter|Class|Function|Helper)", first), first


@quick
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_tells_its_arguments_its_errors_and_an_example(name):
    function, text = FUNCTIONS[name], doc(FUNCTIONS[name])
    signature = inspect.signature(function)
    for parameter in signature.parameters:
        assert re.search(rf"^    (.*\b)?\*?\*?{parameter}\b.*:", text, re.MULTILINE), parameter
    assert "Args:" in text and ">>> " in text
    if FAILS.search(inspect.getsource(inspect.unwrap(function))):
        assert re.search(r"Raises:\n    JspecError: \w", text), "it raises"


@quick
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_is_typed(name):
    signature = inspect.signature(FUNCTIONS[name])
    annotations = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
    assert inspect.Signature.empty not in annotations
    assert signature.return_annotation != "Any"
    assert not any(re.search(r"\bArray\b(?!,)", str(one)) for one in annotations), "an array without a shape"


@quick
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_shapes_and_an_example(name):
    text, fields = doc(CLASSES[name]), inspect.get_annotations(CLASSES[name])
    for field, annotation in fields.items():
        assert not re.search(r"\bArray\b(?!,)", str(annotation)), f"{field}: an array without a shape"
    assert (">>> " in text) or name not in BUILT
    for method, one in vars(CLASSES[name]).items():
        own = getattr(one, "__qualname__", "").startswith(f"{name}.") or isinstance(one, property)
        assert not own or method.startswith("_") or doc(one), f"{method} has no docstring"


@quick
def test_arrays_that_are_arguments_are_told_with_their_shapes():
    for name, arguments in {
        "speculative_sample": ("prompt_tokens", "prompt_length", "max_new_tokens_per_row", "stop_token_ids"),
        "make_request": ("prompt_tokens",),
        "verifiers.outcomes": ("proposal", "logp"),
    }.items():
        text = doc(FUNCTIONS[name])
        for argument in arguments:
            entry = re.search(rf"^    {argument}: (.*(\n      .*)*)", text, re.MULTILINE)
            assert entry and re.search(r"\[[A-Z\w, ]+\]", entry[1]), f"{name}: {argument}"


@quick
@pytest.mark.parametrize("name", [n for n, v in vars(verifiers).items() if isinstance(v, jspec.Verifier)])
def test_a_verifier_is_described_beside_it(name):
    """A value has no docstring of its own: a text stands behind it in its file."""
    room = Path(verifiers.__file__).parent
    for path in room.glob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for one, following in itertools.pairwise(body):
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name:
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                return
    raise AssertionError(f"{name} is defined nowhere")


@quick
def test_the_list_of_public_names_is_complete_and_sorted():
    assert jspec.__all__ == sorted(jspec.__all__)
    assert issubclass(JspecError, ValueError)
    own = {name for name, one in vars(jspec).items() if getattr(one, "__module__", "").startswith("jspec.")}
    assert own <= set(jspec.__all__)
    for room in (drafters, verifiers):
        for module in Path(room.__file__).parent.glob("[a-z]*.py"):
            importlib.import_module(f"{room.__name__}.{module.stem}")
