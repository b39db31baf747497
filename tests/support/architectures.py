"""One row for each architecture that pc-rag is proved on: how to build it tiny, what to expect.

A row states what people know of an architecture (its paper, its model card), so that what the
package finds out on the model itself can be compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOW = 16
"""Sliding windows of tiny models: chunks of tests are longer."""

ORIGINAL_POSITIONS = 1024
"""What the tiny model with longrope was trained for, before its positions were stretched."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MIXED = ("sliding_attention", "full_attention")
_PLACEMENTS = {
    "rope": Placement.ROTATE,
    "alibi": Placement.FREE,
    "absent": Placement.FREE,
    "learned": Placement.FIXED,
}


@dataclass(frozen=True)
class Architecture:
    """A row.

    Attributes:
        name: As ``tiny_model`` takes it.
        family: The models that people know it by.
        model: Name of the class in transformers; absent from old versions where it is newer.
        encoding: How its layers tell positions apart, in the words of ``Capabilities``.
        layers: Encoding and window of every layer: ``rope``, ``alibi``, ``absent`` or ``learned``.
        fields: Of the configuration, beside what all tiny models have.
        tolerance: Largest difference of logits to the oracle's, float32.
        bfloat16: How many times as far as stock transformers in bfloat16 ours may be from float32.
        bfloat16_fields: Fields that change in bfloat16: routers choose all experts.
    """

    name: str
    family: str
    model: str
    encoding: str
    layers: tuple[tuple[str, int | None], ...] = (("rope", None),) * 2
    fields: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4
    bfloat16: float = 2.0
    bfloat16_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        """Where an entry can stand: what its least free layer allows."""
        found = {_PLACEMENTS[encoding] for encoding, _ in self.layers}
        order = (Placement.FIXED, Placement.ROTATE, Placement.FREE)
        return next(placement for placement in order if placement in found)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer."""
        return tuple(window for _, window in self.layers)


def _layers(*layers: str | tuple[str, int | None]) -> tuple[tuple[str, int | None], ...]:
    return tuple((layer, None) if isinstance(layer, str) else layer for layer in layers)


def _scaled(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters},
    }


_SLIDING = (("rope", WINDOW), ("rope", None))
_GQA = {"num_key_value_heads": 2}
_LEARNED = _layers("learned", "learned")
_ALIBI = _layers("alibi", "alibi")
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_group": 1,
    "n_group": 1,
}
_ALL_EXPERTS = {"num_experts_per_tok": 4}

_ROWS = (
    Architecture(
        "llama", "Llama 2 and 3, SmolLM2", "LlamaForCausalLM", "RoPE",
        _layers("rope", "rope", "rope"), _GQA | {"num_hidden_layers": 3},
    ),
    Architecture(
        "llama-mha", "Llama, multi-head attention", "LlamaForCausalLM", "RoPE",
        _layers("rope", "rope", "rope"), {"num_key_value_heads": 4, "num_hidden_layers": 3},
    ),
    Architecture(
        "llama-mqa", "Llama, multi-query attention", "LlamaForCausalLM", "RoPE",
        fields={"num_key_value_heads": 1},
    ),
    Architecture(
        "llama-head-dim", "Llama, heads of their own width", "LlamaForCausalLM", "RoPE",
        _layers("rope", "rope", "rope"), _GQA | {"head_dim": 32, "num_hidden_layers": 3},
    ),
    Architecture(
        "llama-tied", "Llama, tied embeddings", "LlamaForCausalLM", "RoPE",
        fields=_GQA | {"tie_word_embeddings": True},
    ),
    Architecture(
        "llama-linear", "Llama, linear scaling", "LlamaForCausalLM", "RoPE, linear scaling",
        fields=_scaled("linear", factor=4.0),
    ),
    Architecture(
        "llama-llama3", "Llama 3.1 to 3.3", "LlamaForCausalLM", "RoPE, llama3 scaling",
        fields=_scaled(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
    ),
    Architecture(
        "llama-yarn", "Llama, YaRN", "LlamaForCausalLM", "RoPE, YaRN",
        fields=_scaled("yarn", factor=4.0, original_max_position_embeddings=512),
    ),
    Architecture(
        "mistral", "Mistral 7B with windows", "MistralForCausalLM", "RoPE",
        (("rope", WINDOW), ("rope", WINDOW)), _GQA | {"sliding_window": WINDOW},
    ),
    Architecture(
        "mixtral", "Mixtral", "MixtralForCausalLM", "RoPE",
        fields=_GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        bfloat16_fields=_ALL_EXPERTS,
    ),
    Architecture(
        "qwen2", "Qwen 2 and 2.5", "Qwen2ForCausalLM", "RoPE",
        (("rope", None), ("rope", WINDOW)),
        _GQA | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    Architecture(
        "qwen2_moe", "Qwen 1.5 and 2 MoE", "Qwen2MoeForCausalLM", "RoPE",
        fields=_GQA | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        bfloat16_fields=_ALL_EXPERTS,
    ),
    Architecture(
        "qwen3", "Qwen 3", "Qwen3ForCausalLM", "RoPE", _layers("rope", "rope", "rope"),
        _GQA | {"head_dim": 16, "num_hidden_layers": 3},
    ),
    Architecture(
        "qwen3_moe", "Qwen 3 MoE", "Qwen3MoeForCausalLM", "RoPE",
        fields=_GQA | {
            "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "norm_topk_prob": True,
        },
        bfloat16_fields=_ALL_EXPERTS,
    ),
    Architecture(
        "phi3", "Phi-3 and Phi-4", "Phi3ForCausalLM", "RoPE, partial, LongRoPE (short factors)",
        fields=_GQA | {
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
            "partial_rotary_factor": 0.75, "sliding_window": None, "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
                "original_max_position_embeddings": ORIGINAL_POSITIONS,
            },
        },
    ),
    Architecture("olmo", "OLMo", "OlmoForCausalLM", "RoPE", fields={"num_key_value_heads": 4}),
    Architecture("olmo2", "OLMo 2", "Olmo2ForCausalLM", "RoPE", fields=_GQA),
    Architecture(
        "granite", "Granite", "GraniteForCausalLM", "RoPE",
        fields=_GQA | {
            "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    Architecture(
        "smollm3", "SmolLM3", "SmolLM3ForCausalLM", "RoPE; none",
        _layers("rope", "absent"), _GQA | {"no_rope_layers": [1, 0], "pad_token_id": 0},
    ),
    Architecture(
        "gpt_neox", "GPT-NeoX, Pythia", "GPTNeoXForCausalLM", "RoPE, partial",
        _layers("rope", "rope", "rope"),
        {
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25},
            "num_hidden_layers": 3,
        },
    ),
    Architecture(
        "gptj", "GPT-J", "GPTJForCausalLM", "RoPE, partial, interleaved",
        fields={"rotary_dim": 8, "n_inner": 64},
    ),
    Architecture(
        "phi", "Phi-1 and Phi-2", "PhiForCausalLM", "RoPE, partial",
        fields={"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    ),
    Architecture(
        "stablelm", "StableLM", "StableLmForCausalLM", "RoPE, partial",
        fields=_GQA | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25}},
    ),
    Architecture(
        "starcoder2", "StarCoder2", "Starcoder2ForCausalLM", "RoPE",
        (("rope", WINDOW), ("rope", WINDOW)), _GQA | {"sliding_window": WINDOW},
    ),
    Architecture(
        "cohere", "Command R", "CohereForCausalLM", "RoPE, interleaved",
        fields=_GQA | {"logit_scale": 0.25, "pad_token_id": 0, "tie_word_embeddings": True},
    ),
    Architecture(
        "cohere2", "Command R7B", "Cohere2ForCausalLM", "RoPE, interleaved; none",
        (("rope", WINDOW), ("absent", None)),
        _GQA | {
            "logit_scale": 0.25, "pad_token_id": 0, "tie_word_embeddings": True,
            "sliding_window": WINDOW, "layer_types": _MIXED,
        },
    ),
    Architecture(
        "exaone4", "EXAONE 4", "Exaone4ForCausalLM", "RoPE; none",
        (("rope", WINDOW), ("absent", None)),
        _GQA | {"sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_types": _MIXED},
    ),
    Architecture(
        "gemma", "Gemma", "GemmaForCausalLM", "RoPE",
        fields={
            "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0,
        },
    ),
    Architecture(
        "gemma2", "Gemma 2", "Gemma2ForCausalLM", "RoPE", _SLIDING,
        _GQA | {
            "head_dim": 32, "pad_token_id": 0, "attn_implementation": "eager",
            "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0, "sliding_window": WINDOW, "layer_types": _MIXED,
        },
    ),
    Architecture(
        "gemma3_text", "Gemma 3", "Gemma3ForCausalLM", "RoPE; RoPE, linear scaling",
        _SLIDING,
        _GQA | {
            "head_dim": 32, "pad_token_id": 0,
            "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "layer_types": _MIXED,
            "rope_parameters": {
                "sliding_attention": _ROPE,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    Architecture(
        "gpt_oss", "GPT-OSS", "GptOssForCausalLM", "RoPE, YaRN", _SLIDING,
        _GQA | {
            "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
            "sliding_window": WINDOW, "layer_types": _MIXED,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
                "original_max_position_embeddings": 512,
            },
        },
        bfloat16_fields=_ALL_EXPERTS,
    ),
    Architecture(
        "deepseek_v2", "DeepSeek-V2", "DeepseekV2ForCausalLM",
        "RoPE in the rotary channels of MLA, interleaved",
        fields=_MLA | {"topk_method": "greedy"}, bfloat16_fields=_ALL_EXPERTS,
    ),
    Architecture(
        "deepseek_v3", "DeepSeek-V3 and R1", "DeepseekV3ForCausalLM",
        "RoPE in the rotary channels of MLA",
        fields=_MLA, bfloat16_fields=_ALL_EXPERTS,
    ),
    Architecture("mpt", "MPT", "MptForCausalLM", "ALiBi", _ALIBI),
    Architecture("bloom", "BLOOM", "BloomForCausalLM", "ALiBi", _ALIBI),
    Architecture(
        "falcon-rw", "Falcon RW", "FalconForCausalLM", "ALiBi", _ALIBI,
        {
            "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
            "new_decoder_architecture": False,
        },
    ),
    Architecture(
        "falcon", "Falcon 7B", "FalconForCausalLM", "RoPE",
        fields={"alibi": False, "multi_query": True, "new_decoder_architecture": False},
    ),
    Architecture(
        "falcon-new", "Falcon 40B and 180B, Falcon 2", "FalconForCausalLM", "RoPE",
        fields={"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    Architecture("gpt2", "GPT-2", "GPT2LMHeadModel", "learned", _LEARNED),
    Architecture(
        "opt", "OPT", "OPTForCausalLM", "learned", _LEARNED,
        {"ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 1},
    ),
    Architecture(
        "gpt_neo", "GPT-Neo", "GPTNeoForCausalLM", "learned",
        (("learned", None), ("learned", WINDOW)),
        {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    Architecture(
        "gpt_bigcode", "StarCoder, SantaCoder", "GPTBigCodeForCausalLM", "learned", _LEARNED,
        {"multi_query": True},
    ),
)  # fmt: skip

ARCHITECTURES = {row.name: row for row in _ROWS}
"""Every row, by its name."""
