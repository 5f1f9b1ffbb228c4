"""Prompts to ids, and ids to text as they come."""

import json
import random

import pytest

from jspec.errors import JspecError
from jspec.text.tokenizer import Detokenizer, encode_prompt, load_tokenizer, stop_token_ids

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CORPUS = [
    "the quick brown fox says: the end is near",
    "naïve café 日本語 😀😀 tea",
    "one, two  three\n\n",
] * 4
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def wrap(core, **settings):
    settings = dict(bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False) | settings
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **settings)


@pytest.fixture(scope="module")
def bytelevel():
    """GPT-2's kind: any bytes may come in any order."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    return wrap(core, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def bytefallback():
    """Llama 2's kind: spaces as ▁, one stripped at the start, and tokens for single bytes."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces += ["▁", "▁▁", "▁the", "▁end", "a", "b", "é", "the", "end", "\ufffd", "▁STOP", "ST", "OP", "日"]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    make = tokenizers.decoders
    core.decoder = make.Sequence(
        [make.Replace("▁", " "), make.ByteFallback(), make.Fuse(), make.Strip(" ", 1, 0)]
    )
    return wrap(core, unk_token="<unk>")


@pytest.fixture(scope="module")
def wordpiece():
    """BERT's kind: a word's spelling depends on the token before it."""
    pieces = ["[UNK]", "<s>", "</s>", "the", "end", "##s", "##ing", "##e", "is", ".", "near", "tea"]
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece({p: i for i, p in enumerate(pieces)}))
    core.decoder = tokenizers.decoders.WordPiece(cleanup=True)
    return wrap(core, unk_token="[UNK]")


KINDS = ["bytelevel", "bytefallback", "wordpiece"]


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut(full, stops):
    return full[: min((full.find(s) for s in stops if s in full), default=len(full))]


def groups(ids, rng):
    while ids:
        size = rng.randint(0, 6)
        yield ids[:size]
        ids = ids[size:]


def random_ids(tokenizer, rng):
    """Good text, broken bytes and special tokens in one row."""
    ids = []
    for _ in range(rng.randint(1, 12)):
        ids += rng.choices(range(len(tokenizer)), k=rng.randint(0, 4))
        ids += tokenizer.encode(
            rng.choice(["😀", " the end", "日本語", "é", " tea", ""]), add_special_tokens=False
        )
        ids += rng.choice([[], [tokenizer.eos_token_id] * rng.randint(0, 3)])
    return ids


def random_stops(full, rng):
    """Pieces of the text, some of which begin or contain others, and strings that are not in it."""
    stops = ["never", "the enemy"][: rng.randint(0, 2)]
    for _ in range(rng.randint(0, 3) if full else 0):
        start = rng.randrange(len(full))
        stops.append(full[start : start + rng.randint(1, 8)])
        stops += rng.choice([[], [stops[-1] + "x"], [stops[-1][1:]] if len(stops[-1]) > 1 else []])
    return stops


@pytest.mark.parametrize("kind", KINDS)
def test_stream_equals_decode(kind, request):
    """However ids are grouped, the pieces add up to the decoded text, cut at the earliest stop string."""
    tokenizer, rng = request.getfixturevalue(kind), random.Random(0)
    for _ in range(400):
        ids = random_ids(tokenizer, rng)
        stops = random_stops(decode(tokenizer, ids), rng)
        full = decode(tokenizer, ids)
        expected, stream, shown = cut(full, stops), Detokenizer(tokenizer, stops), ""
        for group in groups(ids, rng):
            shown += stream.push(group)
            assert expected.startswith(shown)
        shown += stream.finish()
        assert shown == expected, (ids, stops)
        assert stream.stopped == (expected != full)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_used(kind, request):
    """The least number of tokens that decode to the text; all of them if no stop string came."""
    tokenizer, rng = request.getfixturevalue(kind), random.Random(1)
    for _ in range(200):
        ids = random_ids(tokenizer, rng)
        if kind == "bytefallback":  # a cut inside a run of byte tokens may be off by a few
            ids = [i for i in ids if "<0x" not in tokenizer.convert_ids_to_tokens(i)]
        stops = random_stops(decode(tokenizer, ids), rng)
        stream = Detokenizer(tokenizer, stops)
        shown = "".join(stream.push(group) for group in groups(ids, rng)) + stream.finish()
        least = next(n for n in range(len(ids) + 1) if decode(tokenizer, ids[:n]).startswith(shown))
        assert stream.tokens_used == (least if stream.stopped else len(ids))


def test_tokens_used_of_one_push(bytelevel):
    """A round pushes the stop string and more at once."""
    parts = [bytelevel.encode(t) for t in ("the tea", "near", " the end")]
    stream = Detokenizer(bytelevel, ["near"])
    assert stream.push([i for part in parts for i in part]) == "the tea"
    assert stream.stopped and stream.tokens_used == len(parts[0])
    assert stream.push(parts[0]) == "" == stream.finish()


def test_half_characters_are_held(bytelevel):
    ids = [bytelevel.convert_tokens_to_ids(c) for c in "ðŁĺĢ"]  # the bytes of 😀, as GPT-2 writes them
    stream = Detokenizer(bytelevel)
    assert [stream.push([i]) for i in ids] == ["", "", "", "😀"]
    assert stream.push(ids[:2]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.tokens_used == 6


def test_a_run_of_byte_tokens_is_held_to_its_end(bytefallback):
    """One bad byte spoils the whole run, a good character before it included."""
    run = [bytefallback.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "😀".encode()]
    letter = bytefallback.convert_tokens_to_ids("a")
    good, bad = Detokenizer(bytefallback), Detokenizer(bytefallback)
    assert (good.push(run), good.push([letter])) == ("", "😀a")
    assert (bad.push(run), bad.push(run[:1]), bad.push([letter])) == ("", "", "\ufffd" * 5 + "a")


def test_stop_string_over_tokens_and_pushes(bytelevel):
    ids = bytelevel.encode("tea the end is near")
    stream = Detokenizer(bytelevel, ["the end"])
    shown = [stream.push([i]) for i in ids]
    assert "".join(shown) == "tea " and stream.stopped


def test_what_may_begin_a_stop_string_is_held(bytelevel):
    stream = Detokenizer(bytelevel, ["the enemy"])
    assert stream.push(bytelevel.encode("tea the en")) == "tea "
    assert not stream.stopped
    assert stream.push(bytelevel.encode("d")) == "the end"
    assert (
        Detokenizer(bytelevel, "near").push(bytelevel.encode("the near end")) == "the "
    )  # one, as a plain text


def test_the_earliest_start_wins(bytelevel):
    """A stop string inside one that began earlier and may still end has to wait."""
    stream = Detokenizer(bytelevel, ["bcde", "cd"])
    assert stream.push(bytelevel.encode("abcd")) == "a" and not stream.stopped
    assert stream.push(bytelevel.encode("e")) == "" and stream.stopped
    stream = Detokenizer(bytelevel, ["bcde", "cd"])
    assert stream.push(bytelevel.encode("abcd")) == "a"
    assert stream.push(bytelevel.encode("x")) == "b" and stream.stopped
    stream = Detokenizer(bytelevel, ["bcde", "cd"])
    assert stream.push(bytelevel.encode("abcd")) + stream.finish() == "ab" and stream.stopped
    assert stream.tokens_used == 2


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_empty_stop_string(bytelevel, stop):
    with pytest.raises(JspecError, match="stop strings should be texts of at least one character"):
        Detokenizer(bytelevel, stop)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.count = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **settings):
        self.count += len(ids)
        return self.tokenizer.decode(ids, **settings)


@pytest.mark.parametrize("piece", ["the end ", "<s>", "broken"])
def test_cost_is_linear(bytelevel, piece):
    broken = [bytelevel.convert_tokens_to_ids("ð")]
    ids = (broken if piece == "broken" else bytelevel.encode(piece, add_special_tokens=False)) * 300
    counting = Counting(bytelevel)
    stream = Detokenizer(counting, ["never"])
    shown = "".join(stream.push([i]) for i in ids) + stream.finish()
    assert shown == decode(bytelevel, ids)
    assert counting.count <= 40 * len(ids)


def test_encode_prompt(bytelevel):
    pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "tea"}, {"role": "assistant", "content": "no"}]
    assert bytelevel.decode(encode_prompt(bytelevel, "tea")) == "<s>user:tea</s><s>assistant:"
    assert bytelevel.decode(encode_prompt(bytelevel, messages)) == (
        "<s>user:tea</s><s>assistant:no</s><s>assistant:"
    )
    ids = encode_prompt(bytelevel, "tea", raw=True)
    assert type(ids) is list and bytelevel.decode(ids) == "tea"


def test_encode_prompt_without_template(bytefallback):
    assert encode_prompt(bytefallback, "ab") == bytefallback.encode("ab")
    with pytest.raises(JspecError, match="list of messages, but the tokenizer has no chat template"):
        encode_prompt(bytefallback, [{"role": "user", "content": "ab"}])


def test_encode_prompt_refuses(bytelevel):
    pytest.importorskip("jinja2")
    nothing = wrap(tokenizers.Tokenizer(tokenizers.models.BPE()))  # an empty vocabulary
    for tokenizer, prompt, part in (bytelevel, "", ""), (bytelevel, [], ""), (nothing, "ab", "has no tokens"):
        with pytest.raises(JspecError, match=part or "the prompt is empty"):
            encode_prompt(tokenizer, prompt)
    with pytest.raises(JspecError, match="list of messages, but raw was asked for"):
        encode_prompt(bytelevel, [{"role": "user", "content": "ab"}], raw=True)
    with pytest.raises(JspecError, match="message 1 should have a 'role' and a 'content'"):
        encode_prompt(bytelevel, [{"role": "user", "content": "ab"}, {"content": "ab"}])
    strict = wrap(bytelevel.backend_tokenizer, chat_template="{{ raise_exception('no system\nplease') }}")
    with pytest.raises(JspecError, match=r"the chat template does not take this prompt: no system please$"):
        encode_prompt(strict, "ab")


def test_load_tokenizer(bytelevel, tmp_path):
    with pytest.raises(JspecError, match=f"{tmp_path} has no tokenizer"):
        load_tokenizer(tmp_path)
    bytelevel.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("the end") == bytelevel.encode("the end")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(JspecError, match=f"the tokenizer in {tmp_path} cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("module", ["transformers", "jinja2"])
def test_missing_package(bytelevel, tmp_path, monkeypatch, module):
    bytelevel.save_pretrained(tmp_path)

    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(JspecError, match=f"'{module}' is not installed: pip install 'jspec\\[hf\\]'"):
        load_tokenizer(tmp_path) if module == "transformers" else encode_prompt(bytelevel, "tea")


def test_stop_ids(bytelevel, tmp_path):
    eos = bytelevel.eos_token_id
    assert stop_token_ids(tmp_path, bytelevel) == (eos,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, eos]}))
    assert stop_token_ids(tmp_path, bytelevel) == (9, 7, eos)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_token_ids(str(tmp_path), bytelevel) == (9, 7, eos)


@pytest.mark.parametrize("value", ["</s>", -1, 2**40, [1, "x"], True, 1.5])
def test_malformed_stop_ids(bytelevel, tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(JspecError, match=r"config.json: eos_token_id = .* should be a token id or a list"):
        stop_token_ids(tmp_path, bytelevel)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JspecError, match=r"config.json is not JSON"):
        stop_token_ids(tmp_path, bytelevel)
