"""One model, one fingerprint; anything that changes KV, another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pc_rag.errors import ModelError
from pc_rag.model.fingerprint import digest_weights, fingerprint_of
from pc_rag.model.tokenizer import TextTokenizer
from tests.support.tiny_models import FAMILIES, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = TextTokenizer(tiny_tokenizer())


def fingerprint(family="llama", **options):
    return fingerprint_of(tiny_model(family, **options)[0], TOKENIZER)


def test_fingerprint_is_the_same_when_the_model_is_built_again_in_another_process():
    """Nothing of this process is inside: no hash seed, no address, no time."""
    script = (
        "import json; from tests.model.test_fingerprint import *; "
        "print(json.dumps({f: fingerprint(f) for f in FAMILIES}))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345", "PATH": ""},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    here = {family: fingerprint(family) for family in FAMILIES}
    assert json.loads(output) == here
    assert len(set(here.values())) == len(FAMILIES)


def test_fingerprint_differs_when_the_seed_does():
    """Pitfall 3: the same shapes with other weights are another model."""
    assert fingerprint(seed=0) != fingerprint(seed=1)


def test_fingerprint_differs_when_one_bit_of_one_weight_is_flipped():
    """Every byte of every parameter counts, also far inside a tensor."""
    model, _ = tiny_model("llama")
    before = fingerprint_of(model, TOKENIZER)
    weight = model.model.layers[1].mlp.down_proj.weight.data
    bits = weight.view(torch.int32)
    bits[40, 99] ^= 1
    assert fingerprint_of(model, TOKENIZER) != before
    bits[40, 99] ^= 1
    assert fingerprint_of(model, TOKENIZER) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rms_norm_eps": 1e-3},
        {"dtype": torch.bfloat16},
    ],
    ids=["rope", "norm", "dtype"],
)
def test_fingerprint_differs_when_the_same_weights_compute_otherwise(changes):
    """E6: RoPE parameters, configuration and dtype are inside."""
    assert fingerprint(**changes) != fingerprint()


def test_fingerprint_differs_when_frequencies_are_changed_in_place():
    """Rotary frequencies lie in a buffer that no file holds."""
    model, _ = tiny_model("llama")
    before = fingerprint_of(model, TOKENIZER)
    model.model.rotary_emb.inv_freq *= 0.5
    assert fingerprint_of(model, TOKENIZER) != before


def test_fingerprint_differs_when_the_tokenizer_does():
    """Another vocabulary or template is another model."""
    model, _ = tiny_model("llama")
    other = TextTokenizer(tiny_tokenizer(add_bos=True))
    assert fingerprint_of(model, other) != fingerprint_of(model, TOKENIZER)


def test_fingerprint_is_the_same_when_only_volatile_settings_change():
    """Names, generation and output settings change no KV."""
    model, _ = tiny_model("llama")
    before = fingerprint_of(model, TOKENIZER)
    model.config._name_or_path = "elsewhere"
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.use_cache = False
    model.config.eos_token_id = [1, 2]
    model.set_attn_implementation("eager")
    assert fingerprint_of(model, TOKENIZER) == before


def test_fingerprint_follows_the_adapter_when_one_is_switched():
    """What is active, and how strongly, counts beside the adapter's weights."""
    model, _ = tiny_model("llama")
    plain = fingerprint_of(model, TOKENIZER)
    layer = model.model.layers[0].self_attn.q_proj
    layer.scaling, layer.active_adapters = {"a": 2.0, "b": 2.0}, ["a"]
    with_a = fingerprint_of(model, TOKENIZER)
    layer.active_adapters = ["b"]
    with_b = fingerprint_of(model, TOKENIZER)
    layer.scaling = {"a": 2.0, "b": 4.0}
    stronger = fingerprint_of(model, TOKENIZER)
    layer.disable_adapters = True
    assert len({plain, with_a, with_b, stronger, fingerprint_of(model, TOKENIZER)}) == 5


def test_digest_covers_every_block_when_a_tensor_is_large():
    """Tensors are hashed in blocks; a change at either side of a border counts."""
    model, _ = tiny_model("llama")
    model.register_buffer("large", torch.zeros((1 << 22) + 3))
    digests = {digest_weights(model)}
    for index in (0, (1 << 22) - 1, 1 << 22, -1):
        model.large.zero_()
        model.large[index] = 1
        digests.add(digest_weights(model))
    assert len(digests) == 5


def test_digest_tells_shapes_apart_when_bytes_are_equal():
    """The same bytes under another shape or dtype are other weights."""
    digests = set()
    for tensor in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)):
        model, _ = tiny_model("llama")
        model.register_buffer("extra", tensor)
        digests.add(digest_weights(model))
    assert len(digests) == 3


def test_model_is_refused_when_its_weights_are_not_in_memory():
    """A digest of nothing would make two models equal."""
    model, _ = tiny_model("llama")
    with pytest.raises(ModelError, match="not in memory"):
        digest_weights(model.to("meta"))
