"""`generate` on a tiny model: batches, streaming, stop strings, counts, errors."""

import numpy as np
import pytest

from jspec.decode import make_decoder
from jspec.errors import JspecError
from jspec.sampling.drafters.config import DraftConfig
from jspec.serve import stream as host_loop
from jspec.serve.draft import load_draft
from jspec.serve.generate import CHUNK, generate
from jspec.serve.target import load
from tests import oracle, tiny

PROMPTS = ["a", "the cat, the cat, the", "xyz " * 9]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load(str(tiny.folder(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def plain(target):
    return generate(PROMPTS, target=target, draft="none", max_new_tokens=30)


def test_plain_is_the_oracle(target, plain):
    for prompt, result in zip(PROMPTS, plain, strict=True):
        ids = target.tokenizer.encode(prompt)
        text = oracle.greedy_text(target.model, target.params, ids, len(ids) + 30, target.stop_token_ids)
        assert result.tokens == text[len(ids) :]
        assert result.text == target.tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert result.metrics.num_prompt_tokens == len(ids)
        assert result.metrics.accept_length == 1.0 and result.metrics.acceptance_rate is None


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_drafts_change_nothing_in_a_batch_or_alone(target, plain, k):
    options = dict(target=target, num_speculative_tokens=k, max_new_tokens=30)
    batch = generate(PROMPTS, **options)
    alone = [generate(prompt, **options) for prompt in PROMPTS]
    for results in (batch, alone):
        assert [r.tokens for r in results] == [r.tokens for r in plain]
        assert [r.finish_reason for r in results] == [r.finish_reason for r in plain]
    for one, other in zip(batch, alone, strict=True):
        assert one.metrics.num_accepted_tokens == other.metrics.num_accepted_tokens
        assert one.metrics.num_target_passes == other.metrics.num_target_passes


def test_streaming_brings_the_same_text_and_counts(target):
    pieces = []
    whole = generate(PROMPTS, target=target, max_new_tokens=30)
    streamed = generate(PROMPTS, target=target, max_new_tokens=30, on_piece=pieces.append)
    for row, (one, other) in enumerate(zip(whole, streamed, strict=True)):
        assert "".join(p.text for p in pieces if p.row == row) == one.text == other.text
        assert one.tokens == other.tokens
        assert one.metrics.accepted_per_position == other.metrics.accepted_per_position
        assert one.metrics.num_target_passes == other.metrics.num_target_passes
    seconds = streamed[0].metrics.seconds
    assert seconds.decode == pytest.approx(seconds.draft + seconds.verify + seconds.rest)
    assert whole[0].metrics.seconds.rest is None


def test_a_stop_string_ends_its_row_and_is_cut(target, plain):
    """Rows stop apart; nothing after the string is emitted or counted."""
    stop = plain[2].text[10:13]
    results = generate(PROMPTS, target=target, max_new_tokens=30, stop=stop)
    for free, result in zip(plain, results, strict=True):
        assert result.text == free.text.split(stop)[0]
        assert result.tokens == free.tokens[: len(result.tokens)]
        assert result.finish_reason == ("stop" if stop in free.text else free.finish_reason)
        counts = result.metrics
        assert counts.num_tokens == len(result.tokens)
        assert counts.num_accepted_tokens <= counts.num_tokens + len(stop)
    assert results[2].finish_reason == "stop"


def test_the_host_reads_once_a_generation_and_compiles_once_a_shape(target):
    options = dict(target=target, max_new_tokens=20)
    generate(["warm", "up"], **options)
    drafter = load_draft(target, DraftConfig()).drafter
    decoder = make_decoder(target.model, drafter, chunk=CHUNK)
    programs, reads = decoder.run._cache_size(), host_loop.host_reads
    generate(["other", "prompts of another length"], **options)
    assert host_loop.host_reads == reads + 1
    assert decoder.run._cache_size() == programs


def test_rows_with_a_seed_stand_beside_rows_without_and_greedy_ones(target, plain):
    options = dict(target=target, max_new_tokens=30, temperature=[0.0, 1.2, 1.2], draft="self:1")
    one, two = (generate(PROMPTS, seed=[None, 5, None], **options) for _ in range(2))
    alone = generate(PROMPTS[1], **(options | dict(temperature=1.2)), seed=5)
    assert one[0].tokens == two[0].tokens == plain[0].tokens
    assert one[1].tokens == two[1].tokens == alone.tokens
    assert one[2].tokens != two[2].tokens


def test_the_context_is_an_end(target):
    result = generate("a" * 90, target=target, max_new_tokens=1000)
    assert result.finish_reason == "length" and len(result.tokens) == target.model.context_length - 90
    assert np.isfinite(result.metrics.accept_length)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "there is no prompt"),
        ("a" * 96, {}, "prompt 0 has 96 tokens; the target's context holds 96"),
        ("a", dict(max_new_tokens=0), "max_new_tokens = 0 should be a whole number of at least 1"),
        ("a", dict(max_new_tokens=-3), "max_new_tokens = -3"),
        ("a", dict(num_speculative_tokens=0), "num_speculative_tokens = 0"),
        (
            "a",
            dict(draft="eagle9"),
            "unknown draft 'eagle9': choose one of none, ngram, bigram, self:LAYERS, the folder",
        ),
        ("a", dict(stop=""), "stop strings should be texts of at least one character"),
    ],
)
def test_bad_input_is_named(target, prompt, options, message):
    with pytest.raises(JspecError, match=message):
        generate(prompt, target=target, **options)
