"""Each wrong type and range in each field of each head format: a head or a `JspecError`, nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.weights import heads
from jspec.weights.heads import eagle1, eagle3, medusa
from jspec.weights.heads.files import open_files
from tests.models import faults
from tests.weights import head_files
from tests.weights.head_files import BASE, ORIGINAL, VLLM, VLLM_CONFIG, nvidia, speculators, target, without

RNG = np.random.default_rng(3)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
FUSED = dict(use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
PLAIN = dict(use_aux_hidden_state=False, use_input_layernorm_in_first_layer=True, use_last_layernorm=True)
FORMATS = {
    "eagle": (BASE | dict(rope_scaling=YARN), head_files.eagle1(RNG)),
    "eagle of nvidia": (nvidia(**PLAIN) | dict(architectures=["A"]), head_files.eagle1(RNG)),
    "eagle of speculators": (
        speculators("eagle", BASE, layernorms=True, fusion_bias=True),
        head_files.eagle1(RNG, "transformer", "fusion_fc"),
    ),
    "eagle3": (
        BASE | dict(draft_vocab_size=96, rope_parameters=YARN, target_layer_ids=[1, 2, 3]),
        head_files.eagle3(RNG),
    ),
    "eagle3 of nvidia": (nvidia(**FUSED) | dict(draft_vocab_size=96), head_files.eagle3(RNG)),
    "eagle3 of speculators": (
        speculators("eagle3", BASE | dict(model_type="qwen3", rope_parameters=YARN), draft_vocab_size=96),
        head_files.eagle3(RNG, ("layers.0",), norms=True),
    ),
    "medusa": (dict(medusa_num_heads=3, medusa_num_layers=2), head_files.medusa(RNG, *ORIGINAL)),
    "medusa of vllm": (VLLM_CONFIG, head_files.medusa(RNG, *VLLM, bias=False)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_of_every_format(name, tmp_path, monkeypatch):
    config, state = FORMATS[name]
    source, whole = open_files(head_files.write(tmp_path, config, state)), target()
    for module in (eagle1, eagle3, medusa):  # the config alone is in question
        monkeypatch.setattr(module, "load_params", lambda *arguments, **options: {"heads": []})

    def read(config):
        kind = heads.recognise(tmp_path, config, source.tensors)
        return kind.load(config, source, whole, np.dtype("float32"))[2]

    assert faults.check(monkeypatch, read, config) >= (1 if "medusa" in name else 20)


def test_a_table_of_draft_ids_is_not_made_before_its_size_is_known(tmp_path):
    """It would take gigabytes."""
    config, state = FORMATS["eagle3"]
    sizes = dict(vocab_size=2**31 - 1, draft_vocab_size=2**31 - 1)
    head_files.write(tmp_path, config | sizes, without(state, "t2d"))
    with pytest.raises(JspecError, match="a head for a target of 2147483647 tokens"):
        heads.load_head(tmp_path, target())
