"""What a model must be like for its keys and values to be stored, moved and reused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pc_rag.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FULL_ATTENTION = "full_attention"
_SLIDING_ATTENTION = "sliding_attention"


def check_supported(config: Any, model: PreTrainedModel | None = None) -> None:  # noqa: ANN401 - configurations share no useful type
    """Refuse a model whose stored KV could not be placed, or would silently be wrong.

    Args:
        config: The model's configuration; enough to refuse most before weights are read.
        model: The loaded model, for what only its code tells.

    Raises:
        UnsupportedModelError: Names the architecture, the missing capability and what is needed.
    """
    name = _architecture(config, model)
    _check_kind(config, name)
    _check_layers(config, name)
    _check_attention(config, name)
    _check_positions(config, name)
    if model is not None:
        _check_code(model, name)


def _architecture(config: Any, model: PreTrainedModel | None) -> str:  # noqa: ANN401 - as above
    if model is not None:
        return type(model).__name__
    names = getattr(config, "architectures", None) or (type(config).__name__,)
    return str(names[0])


def _refuse(name: str, capability: str, observed: str, needed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is not supported: {observed}. {needed}", architecture=name, capability=capability
    )


def _check_kind(config: Any, name: str) -> None:  # noqa: ANN401 - as above
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


def _check_layers(config: Any, name: str) -> None:  # noqa: ANN401 - as above
    layer_types = set(getattr(config, "layer_types", None) or ())
    others = sorted(layer_types - {_FULL_ATTENTION, _SLIDING_ATTENTION})
    if others:
        raise _refuse(
            name,
            "attention in every layer",
            f"it has layers of type {', '.join(map(str, others))}",
            "Prompt caching needs a key and a value per token in every layer; recurrent, hybrid "
            "and chunked layers keep something else",
        )
    if getattr(config, "attention_chunk_size", None):
        raise _refuse(
            name,
            "full attention",
            f"it attends in chunks of {config.attention_chunk_size} tokens",
            "Use a model with full attention",
        )
    if getattr(config, "kv_lora_rank", None):
        raise _refuse(
            name,
            "keys and values per head",
            f"it caches compressed KV (kv_lora_rank {config.kv_lora_rank})",
            "Multi-head latent attention comes with a later version; use a model with grouped or "
            "multi-head attention",
        )
    _check_window(config, name, layer_types)


def _check_window(config: Any, name: str, layer_types: set[str]) -> None:  # noqa: ANN401 - as above
    window = getattr(config, "sliding_window", None)
    limit = getattr(config, "max_position_embeddings", None)
    if layer_types:
        is_sliding = _SLIDING_ATTENTION in layer_types
    else:
        is_sliding = bool(getattr(config, "use_sliding_window", True))
    if is_sliding and window is not None and (limit is None or window < limit):
        raise _refuse(
            name,
            "full attention",
            f"it has layers with a sliding window of {window} tokens, smaller than its "
            f"{limit} positions",
            "Sliding-window layers come with a later version; use a model with full attention, or "
            "set max_position_embeddings in its config.json to the window's size",
        )


def _check_attention(config: Any, name: str) -> None:  # noqa: ANN401 - as above
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap:
        raise _refuse(
            name,
            "plain attention scores",
            f"it caps attention scores (attn_logit_softcapping {softcap})",
            "Soft-capped attention comes with a later version; use a model without it",
        )


def _check_positions(config: Any, name: str) -> None:  # noqa: ANN401 - as above
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not rope or getattr(config, "alibi", False):
        raise _refuse(
            name,
            "position encoding",
            "it does not encode positions by rotation (RoPE)",
            "ALiBi, learned and absent position encodings come with a later version; use a RoPE "
            "model such as Llama, Qwen, Mistral or GPT-NeoX",
        )
    if any(isinstance(value, dict) for value in rope.values()):
        raise _refuse(
            name,
            "one rotation for all layers",
            f"its layers rotate differently ({', '.join(sorted(rope))})",
            "A rotation per layer type comes with a later version",
        )
    if 0 in (getattr(config, "no_rope_layers", None) or ()):
        raise _refuse(
            name,
            "one rotation for all layers",
            "some of its layers do not encode positions (no_rope_layers)",
            "A rotation per layer comes with a later version",
        )
    _check_rope_type(config, name, rope)


def _check_rope_type(config: Any, name: str, rope: dict[str, Any]) -> None:  # noqa: ANN401 - as above
    kind = rope.get("rope_type", "default")
    limit = getattr(config, "max_position_embeddings", None)
    if not limit:
        raise _refuse(
            name,
            "context length",
            "its configuration names no max_position_embeddings",
            "Add it to config.json: the number of positions the model was trained for",
        )
    original = rope.get("original_max_position_embeddings") or limit
    if kind == "dynamic" or (kind == "longrope" and limit > original):
        raise _refuse(
            name,
            "a rotation that does not depend on the request",
            f"its RoPE (rope_type {kind!r}) changes with the length of the prompt",
            "Stored keys would be rotated for another length. Use linear, llama3 or YaRN scaling, "
            "or limit max_position_embeddings in config.json to the original length",
        )
    if rope.get("mrope_section"):
        raise _refuse(
            name,
            "one position per token",
            "it rotates by several positions per token (mrope_section)",
            "Use a text-only model",
        )


def _check_code(model: PreTrainedModel, name: str) -> None:
    if getattr(model, "_is_stateful", False):
        raise _refuse(
            name,
            "attention in every layer",
            "it is recurrent, or a hybrid with recurrent layers",
            "Prompt caching needs a key and a value per token in every layer",
        )
    if model.get_output_embeddings() is None:
        raise _refuse(
            name,
            "language model head",
            "it gives no logits over a vocabulary",
            "Load a causal language model (AutoModelForCausalLM)",
        )
    if any(parameter.endswith(".sinks") for parameter, _ in model.named_parameters()):
        raise _refuse(
            name,
            "plain attention scores",
            "it has learned attention sinks",
            "Attention sinks come with a later version; use a model without them",
        )
    has_interface = getattr(model, "_supports_attention_backend", False)
    if not (has_interface and getattr(model, "_supports_sdpa", False)):
        raise _refuse(
            name,
            "attention interface",
            "its code does not call transformers' attention interface",
            "Use an architecture that does, or update transformers",
        )
