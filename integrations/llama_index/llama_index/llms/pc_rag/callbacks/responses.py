"""What events, responses and nodes of LlamaIndex say, read without trusting it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from llama_index.core.base.llms.types import (
    ChatResponse,
    CompletionResponse,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.schema import MetadataMode

from pc_rag.serving.runs import FoundDocument, Told

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.instrumentation.events.llm import LLMCompletionStartEvent
    from llama_index.core.schema import BaseNode, NodeWithScore

METRICS_KEY: Final = "pc_rag"
"""Where ``raw`` of our responses has ``RequestMetrics.to_dict()``."""

_UNKNOWN: Final = "unknown"
"""What LlamaIndex calls a model that does not say its name."""

_OUTPUT_KEYS: Final = ("completion_tokens", "output_tokens", "candidates_token_count")


def _field(holder: object, name: str) -> object:
    """A field of a dictionary or of an object; ``None`` where it has none."""
    if isinstance(holder, Mapping):
        return holder.get(name)
    return getattr(holder, name, None)


def raw_value(response: object, name: str) -> object:
    """What ``raw`` of a response has under a name; ``None`` where it has nothing."""
    return _field(getattr(response, "raw", None), name)


def asked(event: LLMChatStartEvent | LLMCompletionStartEvent) -> str:
    """What a model is asked, as text."""
    return text_of(event.messages) if isinstance(event, LLMChatStartEvent) else event.prompt


def text_of(messages: Sequence[ChatMessage]) -> str:
    """What messages say."""
    return "\n".join(message.content or "" for message in messages)


def model_name(model_dict: Mapping[str, object]) -> tuple[str, bool]:
    """What a model is called when it starts, and whether that is a name of its own.

    The class's name is the last resort.
    """
    for key in ("model_name", "model"):
        name = model_dict.get(key)
        if isinstance(name, str) and name and name != _UNKNOWN:
            return name, True
    name = model_dict.get("class_name")
    return (name if isinstance(name, str) and name else "unknown model"), False


def has_content(response: object) -> bool:
    """Whether a piece of a stream carries anything generated: text, reasoning or a tool call."""
    if isinstance(response, CompletionResponse):
        return bool(response.text if response.delta is None else response.delta)
    if not isinstance(response, ChatResponse):
        return False
    message = response.message
    if response.delta if response.delta is not None else message.content:
        return True
    extra = message.additional_kwargs
    return bool(extra.get("tool_calls") or extra.get("thinking_delta")) or any(
        isinstance(block, ToolCallBlock)
        or (response.delta is None and isinstance(block, ThinkingBlock) and bool(block.content))
        for block in message.blocks
    )


def told(response: object) -> Told:
    """What a response says about itself."""
    name, seconds = raw_value(response, "model"), raw_value(response, "ttft_seconds")
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    return Told(
        model=name if isinstance(name, str) else None,
        ttft_seconds=float(seconds) if is_number else None,  # type: ignore[arg-type]
        num_output_tokens=_num_output_tokens(response),
    )


def _num_output_tokens(response: object) -> int | None:
    usages = (
        raw_value(response, "usage"),
        raw_value(response, "usage_metadata"),
        getattr(response, "additional_kwargs", None),
    )
    for usage in usages:
        for key in _OUTPUT_KEYS:
            count = _field(usage, key)
            if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
                return count
    return None


def found_documents(nodes: Iterable[NodeWithScore]) -> list[FoundDocument]:
    """Nodes as documents: as prompts hold them, and by their text alone."""
    return [_document(each.node) for each in nodes]


def _document(node: BaseNode) -> FoundDocument:
    text = node.get_content(metadata_mode=MetadataMode.LLM).strip()
    alone = node.get_content(metadata_mode=MetadataMode.NONE).strip()
    source = node.metadata.get("file_path") or node.metadata.get("source") or node.node_id
    return FoundDocument(text, str(source), (alone,) if alone != text else ())
