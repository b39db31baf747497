"""How layers encode positions is found on the model itself, and what is not found is refused."""

from __future__ import annotations

from types import MethodType

import pytest
import torch

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.detection.detect import detect
from pc_rag.model.positions import Absent, Alibi, Learned, Rope, RopeStyle
from pc_rag.model.positions.frozen_rope import held
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import FAMILIES, tiny_model

KINDS = {"rope": Rope, "alibi": Alibi, "learned": Learned, "absent": Absent}
INTERLEAVED = {"gptj", "cohere", "cohere2", "deepseek_v2"}
ROTARY_DIMS = {
    "phi3": 12, "gpt_neox": 4, "gptj": 8, "phi": 8, "stablelm": 4, "deepseek_v2": 8,
    "deepseek_v3": 8,
}  # fmt: skip
"""Of models that rotate only a part of a head."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_is_found_as_it_is_when_the_architecture_is_known(name):
    """Encoding and window of each layer are those of its paper or model card."""
    expected = ARCHITECTURES[name]
    model, _ = tiny_model(name)
    found = detect(model)
    layers = found.positions.layers
    kinds = [type(layer.encoding) for layer in layers]
    assert kinds == [KINDS[encoding] for encoding, _ in expected.layers]
    assert tuple(layer.window for layer in layers) == expected.windows
    assert found.positions.placement is expected.placement
    assert len(found.positions.kinds) == len(set(expected.layers))  # like layers share one


@pytest.mark.parametrize("name", ["bloom", "falcon-rw", "mpt", "gptj", "cohere2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_layer_is_found_as_it_is_when_the_model_rounds(name, dtype):
    """Half precision leaves the encodings apart."""
    model, _ = tiny_model(name, dtype=dtype)
    kinds = [type(layer.encoding) for layer in detect(model).positions.layers]
    assert kinds == [KINDS[encoding] for encoding, _ in ARCHITECTURES[name].layers]


def ropes_of(name, **changes):
    model, _ = tiny_model(name, **changes)
    layers = detect(model).positions.layers
    return model, [layer.encoding for layer in layers if isinstance(layer.encoding, Rope)]


@pytest.mark.parametrize(
    "name", [row.name for row in ARCHITECTURES.values() if row.layers[0][0] == "rope"]
)
def test_pairs_and_channels_are_found_when_a_model_rotates(name):
    """Halves or neighbours, a part of a head or all of it, the last channels under MLA."""
    model, ropes = ropes_of(name)
    key_dim = detect(model).shape.key_dim
    for rope in ropes:
        assert rope.style is (RopeStyle.INTERLEAVED if name in INTERLEAVED else RopeStyle.HALVES)
        assert rope.rotary_dim == ROTARY_DIMS.get(name, key_dim)
        assert rope.first_channel == (key_dim - 8 if name.startswith("deepseek") else 0)
        assert rope.inv_freq.dtype is torch.float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_the_models_own_when_it_holds_them(family, dtype):
    """They are read, not recomputed from theta."""
    model, _ = tiny_model(family, dtype=dtype)
    rope = detect(model).positions.layers[0].encoding
    held_by_model = next(b for name, b in model.named_buffers() if name.endswith("inv_freq"))
    assert torch.equal(rope.inv_freq, held_by_model.float())


@pytest.mark.parametrize("name", ["llama-linear", "llama-llama3", "llama-yarn"])
def test_pitfall_8_scaled_frequencies_are_those_of_the_model(name):
    """Pitfall 8: scaled rotations are found as the model uses them."""
    _, (scaled, *_) = ropes_of(name)
    _, (plain, *_) = ropes_of("llama")
    assert not torch.allclose(scaled.inv_freq, plain.inv_freq)


def test_frequencies_are_exact_when_the_model_holds_a_table_of_angles():
    """GPT-J: from sines and cosines of 2048 positions to the powers of its base."""
    _, ropes = ropes_of("gptj")
    expected = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.allclose(ropes[0].inv_freq.double(), expected, rtol=1e-6, atol=0)


def test_layer_types_rotate_each_their_own_way_when_their_bases_differ():
    """Gemma 3: sliding layers have another base, and full layers are scaled."""
    _, (sliding, full) = ropes_of("gemma3_text")
    assert torch.allclose(sliding.inv_freq[1], torch.tensor(10000.0 ** (-1 / 16)))
    assert torch.allclose(full.inv_freq[1], torch.tensor(1e6 ** (-1 / 16) / 8))


@pytest.mark.parametrize(
    ("name", "slopes"),
    [
        ("bloom", [2**-2, 2**-4, 2**-6, 2**-8]),
        ("mpt", [2**-2, 2**-4, 2**-6, 2**-8]),
        ("falcon-rw", [2**-4, 2**-6, 2**-8, 2**-10]),  # divided by the root of 16 channels
    ],
)
def test_slopes_are_the_papers_when_heads_are_a_power_of_two(name, slopes):
    """ALiBi, section 3: a geometric series from 2 ** (-8 / num_heads)."""
    model, _ = tiny_model(name)
    encoding = detect(model).positions.layers[0].encoding
    assert encoding.slopes.tolist() == slopes


@pytest.mark.parametrize(
    ("name", "slopes"),
    [
        ("bloom", [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        ("mpt", [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_slopes_are_the_models_own_when_heads_are_no_power_of_two(name, slopes):
    """Six heads: four of one series, two of the series between."""
    model, _ = tiny_model(name, hidden_size=96, num_attention_heads=6)
    assert detect(model).positions.layers[0].encoding.slopes.tolist() == slopes


def test_geometry_is_seen_when_values_are_narrower_than_keys():
    """MLA: 16 + 8 channels of a key, 16 of a value; multi-query: one head."""
    shape = detect(tiny_model("deepseek_v3")[0]).shape
    assert (shape.num_kv_heads, shape.key_dim, shape.value_dim) == (4, 24, 16)
    assert detect(tiny_model("falcon")[0]).shape.num_kv_heads == 1


def test_window_is_none_when_no_request_is_long_enough_for_it():
    """A window as wide as the model's positions hides nothing."""
    model, _ = tiny_model("mistral", sliding_window=64, max_position_embeddings=64)
    assert detect(model).positions.layers[0].window is None
    model, _ = tiny_model("mistral", sliding_window=63, max_position_embeddings=64)
    assert detect(model).positions.layers[0].window == 63


def test_window_is_refused_when_layers_and_configuration_disagree():
    """Neither is believed alone."""
    model, _ = tiny_model("qwen2")
    model.model.layers[1].self_attn.sliding_window = 5
    with pytest.raises(
        UnsupportedModelError, match=r"layer 1 .*window of 5 .*declares 16"
    ) as caught:
        detect(model)
    assert caught.value.capability == "sliding window"


def test_model_is_refused_when_it_rotates_otherwise_than_it_says():
    """Frequencies that the model holds but does not use are not believed."""
    model, _ = tiny_model("llama")
    rotary = model.model.rotary_emb
    used = rotary.inv_freq.clone()
    forward = type(rotary).forward

    class OtherRotation(type(rotary)):
        def forward(self, states, position_ids):
            before, self.inv_freq = self.inv_freq, used * 1.5
            try:
                return forward(self, states, position_ids)
            finally:
                self.inv_freq = before

    rotary.__class__ = OtherRotation
    with pytest.raises(UnsupportedModelError, match=r"differ .* by [\d.]+ of .*allowed 0\.001"):
        detect(model)


def test_model_is_placed_nowhere_else_when_a_table_stands_beside_rotations():
    """Values that change with the position cannot be moved, whatever the keys do."""
    model, _ = tiny_model("llama")
    table = torch.nn.Parameter(torch.randn(100, 64, generator=torch.Generator().manual_seed(0)))
    last_ids = []

    def remember(_module, _args, kwargs):
        last_ids[:] = kwargs["position_ids"][0].tolist()

    def embed(_module, _args, output):
        return output + torch.nn.functional.embedding(torch.tensor(last_ids), table)

    model.config.max_position_embeddings = 80
    model.model.register_forward_pre_hook(remember, with_kwargs=True)
    model.model.embed_tokens.register_forward_hook(embed)
    found = detect(model)
    assert all(isinstance(layer.encoding, Learned) for layer in found.positions.layers)


def test_model_is_refused_when_its_values_change_and_it_reads_no_table():
    """Keys that move are not enough."""
    model, _ = tiny_model("llama", num_hidden_layers=1)
    last_ids = []

    def remember(_module, _args, kwargs):
        last_ids[:] = kwargs["position_ids"][0].tolist()

    def scale(_module, _args, output):
        return output * (1 + torch.tensor(last_ids)[:, None] / 10)

    model.model.register_forward_pre_hook(remember, with_kwargs=True)
    model.model.layers[0].self_attn.v_proj.register_forward_hook(scale)
    with pytest.raises(UnsupportedModelError, match="layer 0 encoded at position 0 and moved by"):
        detect(model)


def test_frequencies_that_no_layer_uses_are_left_out():
    """They only propose."""
    model, _ = tiny_model("llama")
    model.model.layers[0].register_buffer("inv_freq", torch.ones(8))
    (kind,) = detect(model).positions.kinds
    assert torch.equal(kind.encoding.inv_freq, model.model.rotary_emb.inv_freq)


def test_model_is_found_when_it_turns_backward():
    """The direction is seen, too."""
    model, _ = tiny_model("llama")
    rotary = model.model.rotary_emb
    forward = type(rotary).forward

    class Backward(type(rotary)):
        def forward(self, states, position_ids):
            cos, sin = forward(self, states, position_ids)
            return cos, -sin

    rotary.__class__ = Backward
    (kind,) = detect(model).positions.kinds
    assert torch.equal(kind.encoding.inv_freq, -rotary.inv_freq)


def test_model_is_refused_when_its_slopes_are_unknown():
    """BLOOM with twice the slopes: keys say nothing, logits do."""
    model, _ = tiny_model("bloom")

    def other(self, attention_mask, num_heads, dtype):
        return 2 * type(self).build_alibi_tensor(self, attention_mask, num_heads, dtype)

    model.transformer.build_alibi_tensor = MethodType(other, model.transformer)
    forward = model.forward
    model.forward = lambda input_ids, **kwargs: forward(
        input_ids, attention_mask=kwargs.pop("attention_mask", torch.ones_like(input_ids)), **kwargs
    )
    with pytest.raises(UnsupportedModelError, match=r"differ by [\d.]+ of .*allowed 0\.001"):
        detect(model)


def test_model_is_refused_when_it_gives_no_numbers():
    """NaN is not small; the dtype is named, which may be why."""
    model, _ = tiny_model("llama", dtype=torch.float16)
    model.model.layers[1].self_attn.k_proj.weight.data.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match=r"layer 1 are not finite in torch\.float16"):
        detect(model)


def test_model_is_refused_when_its_layers_have_several_shapes():
    """By name and numbers."""
    model, _ = tiny_model("llama-mha")
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(64, 32)
    attention.v_proj = torch.nn.Linear(64, 32)
    with pytest.raises(UnsupportedModelError, match="layer 1 has 4 query and 2 KV heads") as caught:
        detect(model)
    assert caught.value.capability == "layers of one shape"


@pytest.mark.parametrize("name", ["phi3", "gemma2", "bloom", "gpt2", "gptj"])
def test_model_is_as_it_was_when_detection_is_over(name):
    """Lent, not owned: weights, buffers, configuration, mode and hooks."""
    model, _ = tiny_model(name)

    def state():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        settings = (model.config.to_dict(), model.config._attn_implementation, model.training)
        return {n: t.clone() for n, t in tensors.items()}, hooks, settings

    tensors, hooks, settings = state()
    detect(model)
    after, hooks_after, settings_after = state()
    assert tensors.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in tensors.items())
    assert (hooks, settings) == (hooks_after, settings_after)


def test_long_factors_are_found_when_more_positions_are_asked_for():
    """LongRoPE: one regime for every request, short or long."""
    model, _ = tiny_model("phi3")
    short, long = detect(model), detect(model, max_position=2048)
    assert (short.max_position, long.max_position) == (1024, 2048)
    ratio = long.positions.layers[0].encoding.inv_freq / short.positions.layers[0].encoding.inv_freq
    parameters = model.config.rope_parameters
    factors = torch.tensor(parameters["short_factor"]) / torch.tensor(parameters["long_factor"])
    assert torch.allclose(ratio, factors)
    with held(long.frozen):
        inside = model.model.rotary_emb.inv_freq.clone()
        model(torch.tensor([[1, 2, 3]]))  # a short prompt, under long factors
        assert torch.equal(model.model.rotary_emb.inv_freq, inside)
    assert torch.equal(inside, long.positions.layers[0].encoding.inv_freq)
