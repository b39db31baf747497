"""What a model must be like for its keys and values to be stored, moved and reused.

Only what makes an architecture impossible is refused by its configuration. How its layers encode
positions and attend is found out on the loaded model (see ``detect``), and compared with what the
model computes by itself (see ``self_check``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.positions.frozen_rope import LONGROPE, rope_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_CHUNKED = "chunked_attention"
_BLOCK_FIELDS = ("layer_types", "layers_block_type", "block_types", "layer_block_types")
"""Where configurations say what each layer is."""
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional", LONGROPE})
_SPARSE_FIELDS = ("index_topk", "indexer_types", "compress_ratios", "sparse_attention_config")
"""Fields of attention that leaves tokens out by what they say; short texts do not show it."""


def check_supported(config: Any, model: PreTrainedModel | None = None) -> None:  # noqa: ANN401 - configurations share no useful type
    """Refuse a model whose stored KV could not be placed, or would silently be wrong.

    Args:
        config: The model's configuration; enough to refuse most before weights are read.
        model: The loaded model, for what only its code tells.

    Raises:
        UnsupportedModelError: Names the architecture, the missing capability and what is needed.
    """
    name = _architecture(config, model)
    _check_kind(config, name, is_alone=model is None)
    _check_attention(config, name)
    _check_layers(config, model, name)
    _check_rotations(config, name)
    if model is not None and model.get_output_embeddings() is None:
        raise _refuse(
            name,
            "language model head",
            "it gives no logits over a vocabulary",
            "Load a causal language model (AutoModelForCausalLM)",
        )


def _architecture(config: Any, model: PreTrainedModel | None) -> str:  # noqa: ANN401 - as above
    if model is not None:
        return type(model).__name__
    names = getattr(config, "architectures", None) or (type(config).__name__,)
    return str(names[0])


def _refuse(name: str, capability: str, observed: str, needed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is not supported: {observed}. {needed}", architecture=name, capability=capability
    )


def _is_causal(config: Any) -> bool:  # noqa: ANN401 - as above
    """Whether transformers, or code that comes with the model, has a class for it."""
    remote = getattr(config, "auto_map", None) or {}
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in remote


def _check_kind(config: Any, name: str, *, is_alone: bool) -> None:  # noqa: ANN401 - as above
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(
            name,
            "decoder-only",
            "it is an encoder-decoder",
            "Prompt caching needs a decoder-only causal language model",
        )
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise _refuse(
            name,
            "text only",
            "it takes images or audio beside text",
            "Load the language model alone, as a decoder-only causal language model",
        )
    if is_alone and not _is_causal(config):
        raise _refuse(
            name,
            "causal language model",
            f"transformers {transformers.__version__} loads no {config.model_type} model as a "
            "causal language model",
            "Load a decoder-only causal language model (AutoModelForCausalLM)",
        )


def _check_layers(config: Any, model: PreTrainedModel | None, name: str) -> None:  # noqa: ANN401 - as above
    kinds = {str(kind) for field in _BLOCK_FIELDS for kind in getattr(config, field, None) or ()}
    needed = (
        "Prompt caching needs a key and a value per token in every layer; recurrent, linear and "
        "convolutional layers keep one state of all tokens. Use a model with attention in every "
        "layer"
    )
    if _CHUNKED in kinds or (not kinds and getattr(config, "attention_chunk_size", None)):
        raise _refuse(
            name,
            "full attention",
            f"it attends in chunks of {config.attention_chunk_size} tokens",
            "What a token sees would depend on where its chunk begins; use a model with full or "
            "sliding-window attention",
        )
    if others := sorted(kinds - _LAYER_TYPES):
        raise _refuse(
            name, "attention in every layer", f"it has layers of type {', '.join(others)}", needed
        )
    code = model if model is not None else _class_of(config)
    if getattr(code, "_is_stateful", False):
        raise _refuse(
            name,
            "attention in every layer",
            "it is recurrent, or a hybrid with recurrent layers",
            needed,
        )


def _class_of(config: Any) -> Any:  # noqa: ANN401 - as above
    """The class that a configuration would be loaded as; ``None`` where transformers has none."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _check_attention(config: Any, name: str) -> None:  # noqa: ANN401 - as above
    for field in _SPARSE_FIELDS:
        if getattr(config, field, None):
            raise _refuse(
                name,
                "full attention",
                f"it attends to selected tokens only ({field})",
                "The choice would have to be made over stored KV; use a model with full or "
                "sliding-window attention",
            )
    settings = getattr(config, "attn_config", None)  # MPT's
    if getattr(settings, "alibi", True) is False:
        raise _refuse(
            name,
            "position encoding",
            "it was trained without ALiBi (attn_config.alibi), and transformers computes it with",
            "Use an MPT model with alibi set to true, as MPT-7B and MPT-30B",
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise _refuse(
            name,
            "causal attention",
            "its tokens attend to those behind them (use_bidirectional_attention)",
            "Use a causal language model",
        )


def _check_rotations(config: Any, name: str) -> None:  # noqa: ANN401 - as above
    for parameters in rope_kinds(config).values():
        kind = parameters.get("rope_type", "default")
        if kind == "dynamic":
            raise _refuse(
                name,
                "a rotation that does not depend on the request",
                "its RoPE (rope_type 'dynamic') changes with the length of the prompt",
                "Stored keys would be rotated for another length. Use linear, llama3 or YaRN "
                "scaling, or take the scaling out of config.json and limit "
                "max_position_embeddings to the original length",
            )
        if parameters.get("mrope_section"):
            raise _refuse(
                name,
                "one position per token",
                "it rotates by several positions per token (mrope_section)",
                "Use a text-only model",
            )
        if kind not in _ROPE_TYPES:
            raise _refuse(
                name,
                "a known rotation",
                f"its RoPE scales frequencies in a way that pc-rag does not know "
                f"(rope_type {kind!r})",
                f"Use a model with one of: {', '.join(sorted(_ROPE_TYPES))}",
            )
