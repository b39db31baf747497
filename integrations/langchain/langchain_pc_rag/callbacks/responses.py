"""What a response of any LangChain model says about itself, read without trusting it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from langchain_core.outputs import ChatGeneration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from langchain_core.outputs import ChatGenerationChunk, Generation, GenerationChunk, LLMResult

METRICS_KEY: Final = "pc_rag"
"""Where our models put ``RequestMetrics.to_dict()``."""

_CONTENT_KEYS: Final = ("text", "reasoning", "args", "partial_json", "data")
"""Fields of content blocks and deltas that carry what a model generated."""


def first_generation(response: object) -> Generation | None:
    """The first generation of a response, whole or partial; ``None`` where it has none."""
    for candidates in getattr(response, "generations", None) or ():
        for generation in candidates:
            found: Generation = generation
            return found
    return None


def _metadata(generation: Generation | None) -> Iterator[Mapping[str, Any]]:
    """Where a generation's metadata may stand, the message's first."""
    if isinstance(generation, ChatGeneration):
        yield generation.message.response_metadata or {}
    if generation is not None:
        yield generation.generation_info or {}


def metadata_value(generation: Generation | None, key: str) -> object:
    """What a generation's metadata says under a key; ``None`` where it says nothing."""
    for metadata in _metadata(generation):
        if metadata.get(key) is not None:
            return metadata[key]
    return None


def _usage(generation: Generation | None) -> Mapping[str, Any]:
    if isinstance(generation, ChatGeneration):
        return getattr(generation.message, "usage_metadata", None) or {}
    usage = metadata_value(generation, "usage_metadata")
    return usage if isinstance(usage, Mapping) else {}


def is_replay(generation: Generation | None) -> bool:
    """Whether LangChain's response cache gave the answer: it marks it with a cost of zero."""
    return _usage(generation).get("total_cost") == 0


def num_output_tokens(response: LLMResult, generation: Generation | None) -> int | None:
    """Tokens generated, as the response says; ``None`` where it does not."""
    metrics = metadata_value(generation, METRICS_KEY)
    token_usage = (response.llm_output or {}).get("token_usage")
    for source, key in (
        (_usage(generation), "output_tokens"),
        (token_usage, "completion_tokens"),
        (metadata_value(generation, "token_usage"), "completion_tokens"),
        (metrics, "num_generated_tokens"),
    ):
        count = source.get(key) if isinstance(source, Mapping) else None
        if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
            return count
    return None


def ttft_seconds(generation: Generation | None) -> float | None:
    """The time to the first token that a response reports itself, as ours do."""
    seconds = metadata_value(generation, "ttft_seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return None
    return float(seconds)


def has_content(
    token: str | Sequence[str | Mapping[str, Any]],
    chunk: GenerationChunk | ChatGenerationChunk | None,
) -> bool:
    """Whether a token event carries anything generated: text, reasoning, or a piece of a call."""
    if isinstance(token, str):
        if token:
            return True
    elif any(part if isinstance(part, str) else _is_filled(part) for part in token):
        return True
    return bool(getattr(getattr(chunk, "message", None), "tool_call_chunks", None))


def is_content_event(event: Mapping[str, Any]) -> bool:
    """Whether an event of LangChain's streaming protocol carries anything generated."""
    if event.get("event") != "content-block-delta":
        return False
    delta = event.get("delta")
    if not isinstance(delta, Mapping):
        return False
    return _is_filled(delta) or bool(delta.get("fields"))


def _is_filled(block: Mapping[str, Any]) -> bool:
    return any(block.get(key) for key in _CONTENT_KEYS)


def model_name_at_start(
    serialized: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    invocation_params: Mapping[str, Any] | None,
) -> tuple[str, bool]:
    """What a model is called when it starts, and whether that is a name of its own.

    The class's name is the last resort.
    """
    named = (metadata or {}).get("ls_model_name")
    params = invocation_params or {}
    for name in (named, *(params.get(key) for key in ("model_name", "model", "model_id"))):
        if isinstance(name, str) and name:
            return name, True
    serialized = serialized or {}
    path = serialized.get("id")
    name = path[-1] if isinstance(path, list) and path else serialized.get("name")
    return (name if isinstance(name, str) and name else "unknown model"), False
