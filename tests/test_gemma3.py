"""Gemma 3 270M, real weights read from GGUF, against transformers beyond its window of 512."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, tree
from jspec.sampling.drafters.ngram import ngram
from jspec.sampling.drafters.none import none
from jspec.sampling.verifiers import greedy
from jspec.weights.load import load_checkpoint
from tests import gemma3, oracle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not gemma3.parts(), reason=f"not installed: {gemma3.PACKAGE} and its four parts"),
]
CHUNK, SLOTS = 64, 768
TIE = 1e-3


@pytest.fixture(scope="module")
def loaded():
    return load_checkpoint(gemma3.gguf_file())


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parent / "golden_gemma3.npz") as saved:
        return dict(saved)


def test_the_config_is_gemma_3_270m(loaded):
    config = loaded.config
    assert config.windows == ((512,) * 5 + (None,)) * 3 and config.tied and config.scale == 1 / 16
    assert config.rope.theta == 1e6 and config.window_rope.theta == 1e4


def test_logits_equal_transformers_through_a_ring(loaded, golden):
    """620 tokens in pieces of 64: the ring of 575 slots wraps."""
    model = loaded.family.make(loaded.config)
    cache, hidden = model.init_cache(1, SLOTS, scratch=CHUNK), []
    assert [entry.keys.shape[2] for entry in cache.layers] == [575, 575, 575, 575, 575, SLOTS] * 3
    forward = jax.jit(model.forward, donate_argnums=1)
    tokens = np.pad(golden["tokens"], (0, -len(golden["tokens"]) % CHUNK))
    for piece in tokens.reshape(-1, CHUNK):
        out, _, cache = forward(loaded.params, cache, jnp.array(piece[None]), tree.chain(1, CHUNK))
        cache = model.commit(cache, None, jnp.array([CHUNK]))
        hidden.append(out)
    rows = jnp.concatenate(hidden, axis=1)[:, golden["rows"]]
    logits = np.asarray(model.unembed(loaded.params, rows))[0, :, :: gemma3.EVERY_ID]
    assert np.abs(logits - golden["logits"]).max() < 1e-4 * np.ptp(golden["logits"])


@pytest.mark.parametrize("drafter", [none(), ngram(4)], ids=["none", "ngram"])
def test_greedy_ids_equal_transformers(loaded, golden, drafter):
    assert golden["margins"].min() > TIE
    model = loaded.family.make(loaded.config)
    decoder = decode.make_decoder(model, drafter, greedy, chunk=CHUNK)
    prompt, new = golden["tokens"].tolist(), golden["greedy"].tolist()
    request = oracle.request(model, [prompt, prompt[:300]], SLOTS, [len(prompt) + len(new), 310])
    state = decoder.run(loaded.params, None, decoder.init(loaded.params, None, request))
    assert oracle.texts(state)[0] == prompt + new
