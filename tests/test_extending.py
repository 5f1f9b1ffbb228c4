"""What CONTRIBUTING.md says is enough is enough: each extension is added, and used through the front door.

In memory by the tables that it names and nothing else; and as it stands there, in a copy of the library.
"""

from __future__ import annotations

import json
import operator
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jspec
from jspec import certify, drafters, models, speculative_sample, verifiers
from jspec.certify import report
from jspec.certify.tiny import tiny
from jspec.errors import JspecError
from jspec.models import table
from jspec.models.layers import random_params
from jspec.pallas.verify import fused
from jspec.sampling import distribution, policy
from jspec.sampling.drafters import DraftConfig
from jspec.serve.draft import load_draft
from jspec.types import Policy
from jspec.weights import heads, multimodal
from jspec.weights.huggingface import save_params
from jspec.weights.load import load_checkpoint
from tests import contributing, oracle
from tests import tiny as tiny_files
from tests.contributing import ROOT

quick, slow = pytest.mark.quick, pytest.mark.slow
LOOPING = "abcabcabcabc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_files.folder(tmp_path_factory.mktemp("tiny"))


# In memory.


def test_a_drafter(folder, jspec, monkeypatch):
    loops = contributing.module("jspec/sampling/drafters/loops.py").loops
    monkeypatch.setitem(drafters.BY_NAME, "loops", loops)
    options = ("--target", folder, "--prompt", LOOPING, "--raw", "--max-new-tokens", 30, "--json")
    code, out, _ = jspec("generate", *options, "--draft", "loops", "--num-speculative-tokens", 3)
    plain = json.loads(jspec("generate", *options, "--draft", "none")[1])
    answer = json.loads(out)
    assert code == 0 and answer["tokens"] == plain["tokens"]
    assert answer["metrics"]["num_draft_tokens"] > 0
    assert loops(3) is loops(num_speculative_tokens=3)
    code, _, err = jspec("generate", *options, "--draft", "lops")
    assert code == 1 and "loops" in err
    model, params = oracle.cycle_table()
    known = dict(target=model, drafter=loops(4), key=[0], temperature=0, max_new_tokens=40)
    samples = speculative_sample(params, [[0, 1, 2, 3, 4, 0, 1]], **known)
    assert samples.stats.accepted.sum() == samples.stats.proposed.sum() > 0


@slow
def test_certify_has_a_twin_of_a_drafter(monkeypatch):
    loops = contributing.module("jspec/sampling/drafters/loops.py").loops
    monkeypatch.setitem(drafters.BY_NAME, "loops", loops)
    small = report.twin_of(DraftConfig("loops", 8), None, "float32")
    found = certify.chi_square(*small, verifiers.token, rows=500)
    assert min(found.p_values) > 1e-6 and found.acceptance_rate > 0.05


class WithTopA(Policy):
    """`Policy` with the field that the edit of `jspec.types` adds, behind the others."""

    _fields = (*Policy._fields, "top_a")
    top_a = property(operator.itemgetter(len(Policy._fields)))

    def __new__(cls, *values, **named):
        return tuple.__new__(cls, (*values, *(named[name] for name in cls._fields[len(values) :])))

    def _replace(self, **changes):
        return WithTopA(**{**dict(zip(self._fields, self, strict=True)), **changes})


@pytest.fixture
def top_a(monkeypatch):
    """The setting, by the field, the row of `SETTINGS` and the step."""
    rows = contributing.added("jspec/sampling/policy.py")
    step = dict(vars(distribution))
    exec(contributing.added("jspec/sampling/distribution.py"), step)
    monkeypatch.setattr(policy, "Policy", WithTopA)
    for name, setting in eval("{" + rows + "}", vars(policy)).items():
        monkeypatch.setitem(policy.SETTINGS, name, setting)
    monkeypatch.setattr(distribution, "AFTER_TEMPERATURE", step["AFTER_TEMPERATURE"])


PROBS = np.array([0.6, 0.3, 0.1])
LOGITS = jnp.log(jnp.asarray([PROBS] * 4))


def test_a_sampling_setting(top_a):
    """Row 0 leaves it off, row 1 keeps two tokens: through plain decoding and through drafts."""
    assert policy.make(2, 3, top_a=[0, 0.5]).top_a.tolist() == [0.0, 0.5]
    with pytest.raises(JspecError, match=r"top_a is 2; it must be from 0 \(off\) to 1"):
        policy.make(1, 3, top_a=2)
    options = dict(target=table.make(3), key=range(400), max_new_tokens=10, top_a=[0, 0.5] * 200)
    for drafter in (None, drafters.draft_model(table.make(3), 2)):
        samples = speculative_sample(
            LOGITS, [[0]] * 400, drafter=drafter, draft_params=LOGITS[:, ::-1], logprobs=True, **options
        )
        for row, wanted in ((0, PROBS), (1, [2 / 3, 1 / 3, 0])):
            found = np.bincount(samples.tokens[row::2].ravel(), minlength=3) / 2000
            np.testing.assert_allclose(found, wanted, atol=0.05)
        np.testing.assert_allclose(samples.logprobs.processed[1::2].max(), np.log(2 / 3), rtol=1e-5)


def test_kernels_give_way_to_a_setting_that_they_do_not_know(top_a, caplog):
    """In the rounds that use it; the fused verifier writes what the plain one does."""
    decide = fused.make()
    for value in (0.0, 0.5):
        options = dict(target=table.make(3), key=range(64), max_new_tokens=6, top_a=value)
        plain, by_kernel = (
            speculative_sample(LOGITS, [[0]] * 64, **options, **more) for more in ({}, {"decide": decide})
        )
        assert plain.tokens.tolist() == by_kernel.tokens.tolist()
    assert "verification is plain in rounds where a row uses top_a" in caplog.text


def test_a_setting_is_lossless_in_every_verifier(top_a, monkeypatch):
    monkeypatch.setattr(certify.exact, "policies", lambda vocab: {"top-a": dict(top_a=0.5)})
    certify.exact.all_probs.cache_clear()
    for verifier in (verifiers.token, verifiers.block):
        assert max(found.error for found in certify.exact_distribution(verifier, limit=2)) < 1e-12
    certify.exact.all_probs.cache_clear()


def test_a_family(monkeypatch, tmp_path):
    pine = contributing.module("jspec/models/pine.py")
    monkeypatch.setitem(models.FAMILIES, "pine", pine)
    content = json.loads((tiny_files.GOLDEN / "config.json").read_text()) | {"model_type": "pine"}
    del content["pretraining_tp"]
    described = pine.weights(pine.from_hf(content))
    assert {"q_bias", "k_bias", "v_bias"} < set(described["layers"][0])
    tiny_files.folder(tmp_path / "files")
    params = random_params(described)
    save_params(tmp_path / "pine", content, params, described)
    loaded = load_checkpoint(tmp_path / "pine")
    assert loaded.family is pine
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    shutil.copytree(tmp_path / "pine", tmp_path / "files", dirs_exist_ok=True)
    answer = jspec.generate(LOOPING, target=str(tmp_path / "files"), raw=True, max_new_tokens=8)
    assert len(answer.tokens) == 8
    with pytest.raises(JspecError, match='hidden_act = "gelu" changes the maths'):
        pine.from_hf(content | {"hidden_act": "gelu"})
    wrapped = {"model_type": "llava", "text_config": content, "vision_config": {}}
    assert pine.from_hf(multimodal.text_config(wrapped, True), multimodal.PLACE) == loaded.config


def test_a_verifier(monkeypatch):
    cautious = contributing.module("jspec/sampling/verifiers/cautious.py").cautious
    monkeypatch.setitem(verifiers.VERIFIERS, "cautious", cautious)
    model, params = oracle.cycle_table()
    options = dict(target=model, drafter=drafters.ngram(4, min_ngram=1), key=[0], max_new_tokens=40)
    samples = speculative_sample(params, [[0, 1, 2, 3, 4, 0]], verifier="cautious", temperature=0, **options)
    assert samples.tokens[0, :5].tolist() == [1, 2, 3, 4, 0]
    assert 0.2 < samples.stats.accepted.sum() / samples.stats.proposed.sum() < 0.8
    with pytest.raises(JspecError, match="judges drafts that grow as chain, not as tree"):
        speculative_sample(
            params, [[0]], verifier="cautious", **options | {"drafter": drafters.none(3, "tree")}
        )
    exact = certify.exact_distribution(verifiers.find_verifier("cautious"), limit=2)
    assert len(exact) == 2 and max(found.error for found in exact) < 1e-12


@slow
def test_the_loop_with_a_verifier():
    cautious = contributing.module("jspec/sampling/verifiers/cautious.py").cautious
    draft, draft_params = tiny(1)
    found = certify.chi_square(*tiny(0), drafters.draft_model(draft, 3), draft_params, cautious, rows=500)
    assert min(found.p_values) > 1e-6 and 0.05 < found.acceptance_rate < 0.5


@pytest.fixture
def linear(monkeypatch):
    """The kind of head, by its two files and the line in `KINDS`."""
    network = contributing.module("jspec/models/heads/linear.py")
    monkeypatch.setitem(sys.modules, network.__name__, network)
    loader = contributing.module("jspec/weights/heads/linear.py")
    monkeypatch.setattr(heads, "KINDS", (*heads.KINDS, loader.KIND))
    return loader.KIND


def test_a_kind_of_head(folder, linear, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    width, vocab = config["hidden_size"], config["vocab_size"]
    rng = np.random.default_rng(0)
    guesses = {f"guess.{i}.weight": rng.normal(size=(vocab, width)).astype(np.float32) for i in range(3)}
    for count in (3, 4):
        (own := tmp_path / f"{count}").mkdir()
        save_file(guesses, own / "model.safetensors")
        (own / "config.json").write_text(json.dumps({"heads": count}))
    options = dict(target=jspec.load(str(folder)), raw=True, max_new_tokens=12)
    plain = jspec.generate(LOOPING, draft="none", **options)
    drafted = jspec.generate(LOOPING, draft=DraftConfig(str(tmp_path / "3"), tree_size=6), **options)
    assert drafted.tokens == plain.tokens and drafted.metrics.num_draft_tokens > 0
    with pytest.raises(JspecError, match=r"missing tensors: guess\.3\.weight"):
        jspec.generate(LOOPING, draft=str(tmp_path / "4"), **options)


@slow
def test_certify_has_a_twin_of_a_head(linear):
    small = report.twin_of(DraftConfig("x"), linear, "float32")
    assert small[2].growth == "tree"
    found = certify.chi_square(*small, verifiers.token, rows=500)
    assert min(found.p_values) > 1e-6 and found.acceptance_rate > 0.05


def test_a_drafter_of_ones_own_needs_no_table(folder):
    target = jspec.load(str(folder))
    drafter = contributing.module("jspec/sampling/drafters/loops.py").loops(2)
    assert load_draft(target, drafter).drafter is drafter
    answer = jspec.generate(LOOPING, target=target, draft=drafter, raw=True, max_new_tokens=8)
    assert len(answer.tokens) == 8


# As it stands in CONTRIBUTING.md, in a copy of the library.


PLACES = {
    "jspec/types.py": ("types.py", "Policy"),
    "jspec/sampling/policy.py": ("sampling/policy.py", "SETTINGS"),
    "jspec/sampling/distribution.py": ("sampling/distribution.py", "AFTER_TEMPERATURE"),
    "jspec/sampling/drafters/__init__.py": ("sampling/drafters/", "BY_NAME"),
    "jspec/sampling/verifiers/__init__.py": ("sampling/verifiers/", "VERIFIERS"),
    "jspec/models/__init__.py": ("models/", "FAMILIES"),
    "jspec/weights/heads/__init__.py": ("weights/heads/", "KINDS"),
}


@quick
def test_the_architecture_lists_the_places_that_are_edited():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = text[text.index("## To do this, touch that") : text.index("## Choices")].splitlines()
    assert set(contributing.edits()) == set(PLACES)
    for path, (shown, name) in PLACES.items():
        assert name in (ROOT / path).read_text()
        assert any(f"`{shown}`" in row and f"`{name}`" in row for row in rows), path


@quick
@pytest.mark.parametrize("path", contributing.edits())
def test_the_edits_find_their_places(path):
    new = contributing.edited(path, (ROOT / path).read_text(encoding="utf-8"))
    compile(new, path, "exec")
    assert new != (ROOT / path).read_text(encoding="utf-8")


@quick
def test_new_files_are_new_and_begin_with_what_they_are():
    for path, code in contributing.FILES.items():
        assert not (ROOT / path).exists()
        compile(code, path, "exec")
        assert code.splitlines()[1].startswith('"""'), path


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The library with everything that CONTRIBUTING.md adds, and its tests beside it."""
    root = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("jspec", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    for path, code in contributing.FILES.items():
        (root / path).write_text(code, encoding="utf-8")
    for path in contributing.edits():
        new = contributing.edited(path, (root / path).read_text(encoding="utf-8"))
        (root / path).write_text(new, encoding="utf-8")
    return root


def python(copy, *arguments):
    """Run Python in the copy, which is found before the library that is installed."""
    found = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


@slow
def test_the_programs_run_in_a_copy(copy):
    where = "import jspec, sys; assert jspec.__file__.startswith(sys.argv[1]), jspec.__file__\n"
    out = python(copy, "-c", where + "\n".join(contributing.PROGRAMS), copy)
    for said in (
        "drafts accepted",
        "with top-a: {0, 1, 2} {0, 1}",
        "a pine wrote",
        "off by",
        "tree of 8 nodes",
    ):
        assert said in out


@slow
def test_the_command_of_a_copy_has_it_all(copy, folder):
    command = ("-c", "from jspec.cli import main; main()", "generate")
    shown = python(copy, *command, "--help")
    assert "loops" in shown and "--top-a" in shown and "cautious" in shown
    options = ("--target", folder, "--prompt", LOOPING, "--raw", "--max-new-tokens", 8, "--json", "--seed", 1)
    options += ("--draft", "loops", "--temperature", 1, "--top-a", 1, "--verifier", "cautious")
    assert json.loads(python(copy, *command, *options))["finish_reason"] == "length"


@slow
def test_the_tests_of_a_copy_have_it_all(copy):
    """The conformance list has the drafter, χ² of the loop included, without another edit."""
    run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-n0")
    conformance = ("tests/sampling/drafters/test_conformance.py", "tests/test_loop_distribution.py")
    out = python(copy, *run, *conformance, "-k", "loops")
    assert " passed" in out and int(out.split(" passed")[0].split()[-1]) >= 6
    python(copy, *run, "tests/test_imports.py", "-k", "not light")
