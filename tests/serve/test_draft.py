"""Heads by their folders: text, trees, certificates and every mistake, through the command."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jspec.certify import exact, report
from jspec.errors import JspecError
from jspec.sampling.drafters import BY_NAME, DraftConfig
from jspec.sampling.verifiers import VERIFIERS, lossy
from jspec.serve.draft import load_draft
from jspec.serve.generate import generate
from jspec.serve.target import load
from jspec.weights.heads import KINDS
from tests import tiny

HEADS = Path(__file__).parents[1] / "models" / "golden" / "heads"
PROMPTS = ["the cat, the cat, the", "abc", "a dog and a dog and 12 cats"]


def with_tokenizer(golden: str, path: Path) -> str:
    """A golden target that writes characters."""
    tiny.folder(path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(HEADS / golden / "target" / name, path)
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {kind: with_tokenizer(kind, tmp_path_factory.mktemp(kind)) for kind in ("eagle1", "eagle3")}
    return paths | {"medusa": paths["eagle1"]}


CASES = [
    ("eagle1", "eagle1/head_bias", dict(tree="static")),
    ("eagle3", "eagle3/head", dict(num_speculative_tokens=3)),
    ("medusa", "medusa/head", {}),
    pytest.param("eagle1", "eagle1/head_bias", {}, marks=pytest.mark.slow),
    pytest.param("eagle1", "eagle1/head_nobias", dict(tree="dynamic", tree_size=12), marks=pytest.mark.slow),
    pytest.param("eagle3", "eagle3/head", dict(tree="static", tree_size=6), marks=pytest.mark.slow),
    pytest.param("medusa", "medusa/head", dict(tree="chain"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("target", "head", "options"), CASES)
def test_a_head_writes_the_plain_text(folders, target, head, options):
    """The same ids in a ragged batch, greedy; and of a row at temperature 1 by the coupled verifier."""
    common = dict(target=folders[target], max_new_tokens=24, verifier="coupled", seed=3)
    common |= dict(temperature=[0.0, 1.0, 0.0])
    found = generate(PROMPTS, draft=DraftConfig(str(HEADS / head), **options), **common)
    plain = generate(PROMPTS, draft="none", **common)
    assert [f.tokens for f in found] == [p.tokens for p in plain]
    assert sum(f.metrics.num_draft_tokens for f in found) > 0


def test_the_command_takes_heads_and_trees(jspec, folders, tmp_path):
    options = ("--target", folders["eagle1"], "--draft", HEADS / "eagle1" / "head_bias")
    tree = ("--tree", "dynamic", "--tree-size", 10, "--tree-depth", 3, "--tree-topk", 4)
    sampled = ("--temperature", 0.8, "--seed", 1, "--max-new-tokens", 12)
    code, out, err = jspec("generate", *options, *tree, *sampled, "--prompt", "abc")
    assert code == 0 and out and "accept length" in err
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc abc"}\n')
    measured = ("--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 8, "--repeats", 1)
    code, out, _ = jspec("bench", *options, *tree, *measured, "--json", tmp_path / "b.json")
    rows = json.loads((tmp_path / "b.json").read_text())["results"]
    assert code == 0 and [row["name"] for row in rows] == ["none", "head_bias dynamic N=10"]
    assert rows[1]["tree"] == "dynamic" and rows[1]["draft_cost_a_round"] > 0


@pytest.mark.slow
def test_certify_takes_heads(jspec, folders, monkeypatch, tmp_path):
    monkeypatch.setattr(exact, "INSTANCES", {"random": exact.INSTANCES["random"]})
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc abc"}\n')
    options = ("--target", folders["medusa"], "--draft", HEADS / "medusa" / "head", "--verifier", "token")
    limits = ("--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 8, "--rows", 200)
    code, out, _ = jspec("certify", *options, *limits)
    assert code == 0 and "exact distribution   token, sampled tree" in out
    assert "tokens equal bit for bit" in out


def test_every_kind_has_a_tiny_twin():
    kinds = {kind.name: kind for kind in KINDS}
    for name, config in [
        ("eagle", DraftConfig("x")),
        ("eagle3", DraftConfig("x", tree="static", tree_size=40)),
        ("eagle", DraftConfig("x", tree="dynamic")),
        ("medusa", DraftConfig("x")),
        ("", DraftConfig("x", 8)),
        *[("", DraftConfig(draft)) for draft in BY_NAME],
    ]:
        head = kinds.get(name)
        target, _, drafter, _ = report.twin_of(config, head, "float32")
        assert target.vocab_size == 5 and drafter.depth <= 3
        grows_tree = config.tree is not None or (head is not None and head.default_tree != "chain")
        assert (drafter.growth == "tree") == grows_tree


def test_simulated_acceptance_is_timed_and_marked(jspec, folders):
    options = ("--target", folders["eagle1"], "--prompt", PROMPTS[2], "--max-new-tokens", 40)
    code, out, err = jspec("generate", *options, "--simulated-acceptance", "1,1,0")
    assert code == 0 and err.startswith("SIMULATED ACCEPTANCE") and "not real" in err
    code, out, _ = jspec("generate", *options, "--simulated-acceptance", "1,1,0", "--json")
    answer = json.loads(out)
    assert answer["simulated"] and answer["metrics"]["accept_length"] == pytest.approx(3, abs=0.2)
    assert "simulated" not in json.loads(jspec("generate", *options, "--json")[1])
    code, _, err = jspec("certify", "--target", folders["eagle1"], "--simulated-acceptance", ".5")
    assert code == 1 and "'simulated_lossy' is lossy" in err


def test_typical_acceptance_is_lossy_and_greedy_at_temperature_0(folders):
    assert not lossy.typical_lossy.lossless and VERIFIERS["typical_lossy"] is lossy.typical_lossy
    common = dict(target=folders["medusa"], max_new_tokens=16, draft=str(HEADS / "medusa" / "head"))
    plain = generate("abc", target=folders["medusa"], max_new_tokens=16, draft="none")
    assert generate("abc", verifier="typical_lossy", **common).tokens == plain.tokens


def target_of(folders, kind):
    return load(folders[kind])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "eagle1",
            dict(draft="ngram", tree="static"),
            "'ngram' grows as a chain: trees are for draft heads",
        ),
        ("eagle1", dict(draft="self:1", tree_size=4), "grows as a chain"),
        (
            "eagle1",
            dict(draft="H", tree="wide"),
            "unknown tree 'wide': choose one of chain, static, dynamic",
        ),
        ("eagle1", dict(draft="H", tree_size=9), "tree_size is for trees"),
        (
            "eagle1",
            dict(draft="H", tree="dynamic", tree_size=90, tree_depth=2, tree_topk=8),
            "90 nodes cannot",
        ),
        ("eagle1", dict(draft="H", tree="static", tree_topk=0), "tree_topk = 0 should be a whole number"),
        (
            "eagle1",
            dict(draft="H", tree="static", tree_depth=4000),
            "4000 tokens deep do not fit the target's",
        ),
        (
            "eagle1",
            dict(draft="H", tree="static", tree_topk=4000),
            "tree_topk = 4000, but the head has only",
        ),
        ("medusa", dict(draft="H", tree="dynamic"), "a chain or a static tree"),
        (
            "medusa",
            dict(draft="H", num_speculative_tokens=9, tree="chain"),
            "9 tokens deep need as many Medusa heads; there are",
        ),
        ("eagle1", dict(draft="H", simulated_acceptance=(0.5,)), "give either it or the draft"),
        ("eagle1", dict(simulated_acceptance=(1.5,)), "should be chances from 0 to 1"),
        (
            "eagle1",
            dict(simulated_acceptance=(0.5,), tree="static"),
            "of a chain, not of a static tree",
        ),
        ("eagle1", dict(draft=str(HEADS / "eagle3" / "head")), "layer"),
        ("eagle1", dict(draft="no/such/folder"), "the folder of a model or of a draft head"),
    ],
)
def test_what_cannot_be_had_is_named(folders, kind, options, message):
    own = {"eagle1": "eagle1/head_bias", "medusa": "medusa/head"}
    if options.get("draft") == "H":
        options = options | dict(draft=str(HEADS / own[kind]))
    with pytest.raises(JspecError, match=message):
        load_draft(target_of(folders, kind), DraftConfig(**options))


def test_a_head_that_is_cut_short_is_one_line(jspec, folders, tmp_path):
    shutil.copytree(HEADS / "eagle1" / "head_bias", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, out, err = jspec(
        "generate", "--target", folders["eagle1"], "--draft", tmp_path / "cut", "--prompt", "a"
    )
    assert code == 1 and out == "" and "cut short" in err and "Traceback" not in err


def test_a_model_with_one_layer_is_no_head(folders, tmp_path):
    """A Llama of one layer has an EAGLE-1 head's names and more; it drafts as a model."""
    base = target_of(folders, "eagle1")
    path = Path(folders["eagle1"])
    shutil.copytree(path, tmp_path / "one")
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n}
    save_file(kept, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    assert load_draft(base, DraftConfig(str(tmp_path / "one"))).head is None
