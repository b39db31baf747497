"""Tiny random models whose attention reaches pc-rag in every way that it can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from pc_rag.model.buffer_pool import KVShape
from pc_rag.model.positions import Absent, Alibi, LayerAttention, ModelPositions

HIDDEN_SIZE = 32
HEAD_DIM = 8
_SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
"""Of four heads: the powers that the paper on ALiBi gives them."""


@dataclass(frozen=True)
class TinySpec:
    """A tiny model.

    Attributes:
        architecture: Name of its class, less ``ForCausalLM``.
        options: Of its configuration, beside the sizes that all share.
        num_kv_heads: Key/value heads that are worth storing.
        slopes: Of its ALiBi, behind the scaling of scores.
        windows: Of its layers.
    """

    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    num_kv_heads: int = 4
    slopes: torch.Tensor | None = None
    windows: tuple[int | None, ...] = (None, None)

    @property
    def positions(self) -> ModelPositions:
        """Biases and windows; whatever the model does to keys itself is left to it."""
        encoding = Absent() if self.slopes is None else Alibi(self.slopes)
        kinds = {window: LayerAttention(encoding, window) for window in self.windows}
        return ModelPositions(tuple(kinds[window] for window in self.windows))

    @property
    def shape(self) -> KVShape:
        """What its layers are expected to hand on, where values are as wide as keys."""
        return KVShape(len(self.windows), self.num_kv_heads, HEAD_DIM, HEAD_DIM)


_NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
_OLD_FALCON = {"new_decoder_architecture": False, "alibi": False}
_MPT = {"max_seq_len": 64}
FOREIGN = {
    "bloom": TinySpec("Bloom", slopes=_SLOPES),
    "bloom-sliced": TinySpec(
        "Bloom", {"pretraining_tp": 2, "slow_but_exact": True}, slopes=_SLOPES
    ),
    "bloom-post": TinySpec(
        "Bloom", {"apply_residual_connection_post_layernorm": True}, slopes=_SLOPES
    ),
    "mpt": TinySpec("Mpt", _MPT, slopes=_SLOPES),
    "mpt-clipped": TinySpec(
        "Mpt",
        _MPT | {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4}},
        slopes=_SLOPES,
    ),
    "falcon": TinySpec("Falcon", _OLD_FALCON | {"multi_query": True}, num_kv_heads=1),
    "falcon-multi-head": TinySpec(
        "Falcon", _OLD_FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "falcon-grouped": TinySpec("Falcon", _NEW_FALCON, num_kv_heads=2),
    "falcon-alibi": TinySpec(
        "Falcon",
        _OLD_FALCON | {"multi_query": True, "alibi": True},
        num_kv_heads=1,
        slopes=_SLOPES / HEAD_DIM**0.5,
    ),
    "gpt_neo": TinySpec(
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        windows=(None, 4),
    ),
    "xglm": TinySpec("XGLM", {"ffn_dim": 48, "init_std": 0.3}),
}
"""Architectures that do not call transformers' attention interface."""

_GROUPED = {"num_key_value_heads": 2}
_SIZED = _GROUPED | {"head_dim": HEAD_DIM}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_UNWINDOWED = {"sliding_window": 64}
INTERFACED = {
    "gpt2": TinySpec("GPT2"),
    "gpt_bigcode": TinySpec("GPTBigCode", {"multi_query": True}, num_kv_heads=1),
    "phi": TinySpec("Phi", _GROUPED, num_kv_heads=2),
    "phi3": TinySpec("Phi3", _GROUPED, num_kv_heads=2),
    "gemma": TinySpec("Gemma", _SIZED, num_kv_heads=2),
    "gemma2": TinySpec(
        "Gemma2",
        _SIZED
        | _UNWINDOWED
        | {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # transformers' other code leaves the caps out
        },
        num_kv_heads=2,
    ),
    "gemma3": TinySpec("Gemma3", _SIZED | _UNWINDOWED, num_kv_heads=2),
    "cohere": TinySpec("Cohere", _GROUPED | {"logit_scale": 0.3}, num_kv_heads=2),
    "cohere2": TinySpec("Cohere2", _GROUPED | _UNWINDOWED, num_kv_heads=2),
    "mixtral": TinySpec("Mixtral", _GROUPED | {"num_local_experts": 4}, num_kv_heads=2),
    "qwen2": TinySpec("Qwen2", _GROUPED, num_kv_heads=2),
    "qwen2_moe": TinySpec(
        "Qwen2Moe", _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 16}, num_kv_heads=2
    ),
    "qwen3_moe": TinySpec("Qwen3Moe", _SIZED | _EXPERTS, num_kv_heads=2),
    "deepseek_v2": TinySpec("DeepseekV2", _LATENT | {"topk_method": "greedy"}),
    "deepseek_v3": TinySpec("DeepseekV3", _LATENT),
    "starcoder2": TinySpec("Starcoder2", _GROUPED, num_kv_heads=2),
    "granite": TinySpec(
        "Granite",
        _GROUPED | {"logits_scaling": 3.0, "attention_multiplier": 0.5},
        num_kv_heads=2,
    ),
    "olmo": TinySpec("Olmo", _GROUPED, num_kv_heads=2),
    "olmo2": TinySpec("Olmo2", _GROUPED, num_kv_heads=2),
    "smollm3": TinySpec("SmolLM3", _GROUPED | {"no_rope_layers": [1, 0]}, num_kv_heads=2),
    "gpt_oss": TinySpec("GptOss", _SIZED | _UNWINDOWED | {"num_local_experts": 4}, num_kv_heads=2),
    "exaone4": TinySpec("Exaone4", _GROUPED | _UNWINDOWED, num_kv_heads=2),
    "biogpt": TinySpec("BioGpt"),
}
"""Architectures that call it in every version of transformers that pc-rag declares."""

NEWLY_INTERFACED = {
    "opt": TinySpec("OPT", {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN_SIZE, "init_std": 0.3}),
    "gptj": TinySpec("GPTJ", {"rotary_dim": 4}),
    "codegen": TinySpec("CodeGen", {"rotary_dim": 4, "n_ctx": 64}),
    "stablelm": TinySpec("StableLm", _GROUPED, num_kv_heads=2),
    "persimmon": TinySpec("Persimmon"),
}
"""Architectures that do so in later ones."""

_SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_OTHER_NAMES = {
    "Bloom": ("hidden_size", "n_layer", "n_head", None, None),
    "Mpt": ("d_model", "n_layers", "n_heads", None, None),
    "XGLM": ("d_model", "num_layers", "attention_heads", None, "max_position_embeddings"),
    "GPTNeo": ("hidden_size", "num_layers", "num_heads", None, "max_position_embeddings"),
    "GPT2": ("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
    "GPTBigCode": ("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
    "GPTJ": ("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
    "CodeGen": ("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
}


def build(spec: TinySpec) -> Any:
    """The model in eval mode; every bias is random too, so that none can be left out."""
    names = _OTHER_NAMES.get(spec.architecture, tuple(_SIZES))
    sizes = {name: value for name, value in zip(names, _SIZES.values(), strict=True) if name}
    kind = "TextConfig" if spec.architecture == "Gemma3" else "Config"
    config = getattr(transformers, spec.architecture + kind)(
        **sizes,
        vocab_size=99,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **spec.options,
    )
    head = "LMHeadModel" if spec.architecture == "GPT2" else "ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, spec.architecture + head)(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()
