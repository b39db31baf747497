"""The rotation is found on the model itself, and a model without one is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.detect_rope import detect_rope
from pc_rag.model.loading import wrap_model
from pc_rag.model.positions import RopeStyle
from tests.support.tiny_models import FAMILIES, tiny_model, tiny_tokenizer


def cohere():
    config = CohereConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=257,
        eos_token_id=259,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CohereForCausalLM(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_are_found_on_models_of_that_kind(family, dtype):
    """Llama, Qwen and GPT-NeoX rotate halves; GPT-NeoX a quarter of its channels."""
    model, _ = tiny_model(family, dtype=dtype)
    rope = detect_rope(model)
    assert rope.style is RopeStyle.HALVES
    assert rope.inv_freq.dtype is torch.float32
    head_dim = getattr(model.config, "head_dim", None) or 16
    assert rope.rotary_dim == (head_dim // 4 if family == "gpt_neox" else head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved_pairs_are_found_on_cohere(dtype):
    """Cohere rotates neighbouring channels; nothing but its keys says so."""
    assert detect_rope(cohere().to(dtype)).style is RopeStyle.INTERLEAVED


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
            "rope_theta": 1e4,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 1e4,
        },
    ],
    ids=["linear", "llama3", "yarn"],
)
def test_pitfall_8_scaled_frequencies_are_those_of_the_model(parameters):
    """Pitfall 8: scaled rotations are found as the model uses them, not recomputed from theta."""
    scaled = detect_rope(tiny_model("llama", rope_parameters=parameters)[0])
    plain = detect_rope(tiny_model("llama")[0])
    assert not torch.allclose(scaled.inv_freq, plain.inv_freq)


def test_model_with_learned_positions_is_refused():
    """GPT-2 has no rotary frequencies."""
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=300, n_positions=64,
        bos_token_id=257, eos_token_id=259,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with pytest.raises(UnsupportedModelError, match="0 sets of rotary frequencies") as caught:
        detect_rope(model)
    assert caught.value.architecture == "GPT2LMHeadModel"
    with pytest.raises(UnsupportedModelError):
        wrap_model(model, tiny_tokenizer())


def test_model_whose_keys_do_not_move_by_its_rotation_is_refused():
    """Frequencies that the model holds but does not use are not believed."""
    model, _ = tiny_model("llama")
    rotary = model.model.rotary_emb
    used = rotary.inv_freq.clone()
    forward = type(rotary).forward

    class OtherRotation(type(rotary)):
        def forward(self, states, position_ids):
            held, self.inv_freq = self.inv_freq, used * 1.5
            try:
                return forward(self, states, position_ids)
            finally:
                self.inv_freq = held

    rotary.__class__ = OtherRotation
    with pytest.raises(UnsupportedModelError, match="cannot be moved by a rotation"):
        detect_rope(model)


def test_model_with_absolute_positions_beside_rope_is_refused():
    """Values that change with the position cannot be stored once for all places."""
    model, _ = tiny_model("llama")
    table = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    last_ids = []

    def add_positions(_module, args, kwargs):
        last_ids[:] = kwargs["position_ids"][0].tolist()

    def embed(_module, _args, output):
        return output + table[torch.tensor(last_ids)]

    model.model.register_forward_pre_hook(add_positions, with_kwargs=True)
    model.model.embed_tokens.register_forward_hook(embed)
    with pytest.raises(UnsupportedModelError, match="keys and values"):
        detect_rope(model)


def test_model_whose_values_alone_depend_on_the_position_is_refused():
    """Keys that move are not enough."""
    model, _ = tiny_model("llama", num_hidden_layers=1)
    last_ids = []

    def remember_positions(_module, _args, kwargs):
        last_ids[:] = kwargs["position_ids"][0].tolist()

    def scale_values(_module, _args, output):
        return output * (1 + torch.tensor(last_ids)[:, None] / 10)

    model.model.register_forward_pre_hook(remember_positions, with_kwargs=True)
    model.model.layers[0].self_attn.v_proj.register_forward_hook(scale_values)
    with pytest.raises(UnsupportedModelError, match="cannot be moved"):
        detect_rope(model)


def test_model_with_two_sets_of_frequencies_is_refused():
    """One rotation for all layers, or none."""
    model, _ = tiny_model("llama")
    model.model.layers[0].register_buffer("inv_freq", torch.ones(8))
    with pytest.raises(UnsupportedModelError, match="2 sets"):
        detect_rope(model)


def test_model_that_gives_no_numbers_is_refused():
    """NaN is not small."""
    model, _ = tiny_model("llama")
    model.model.layers[0].self_attn.k_proj.weight.data.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError):
        detect_rope(model)


def test_detection_leaves_the_model_as_it_was():
    """Lent, not owned."""
    model, _ = tiny_model("qwen3")
    before = model.config._attn_implementation
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    detect_rope(model)
    assert model.config._attn_implementation == before
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())
