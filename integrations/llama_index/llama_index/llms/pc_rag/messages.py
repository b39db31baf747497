"""LlamaIndex's messages, blocks and tools to a conversation, and replies to its responses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from pydantic import BaseModel

from pc_rag.errors import PromptError
from pc_rag.model.conversation import CachePoint as PcRagCachePoint
from pc_rag.model.conversation import ChatMessage as PcRagMessage
from pc_rag.model.conversation import Conversation, ToolCall, ToolSpec, parse_ttl
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from llama_index.core.base.llms.types import ContentBlock

    from pc_rag.serving import Reply

_ROLES = {
    MessageRole.SYSTEM: Role.SYSTEM,
    MessageRole.DEVELOPER: Role.SYSTEM,
    MessageRole.USER: Role.USER,
    MessageRole.ASSISTANT: Role.ASSISTANT,
    MessageRole.CHATBOT: Role.ASSISTANT,
    MessageRole.MODEL: Role.ASSISTANT,
    MessageRole.TOOL: Role.TOOL,
    MessageRole.FUNCTION: Role.TOOL,
}
_BLOCK_SEPARATOR = "\n"
"""Between the texts of a message, as ``ChatMessage.content`` joins them."""


def to_conversation(
    messages: Iterable[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None
) -> Conversation:
    """LlamaIndex's messages, and tools in OpenAI's form, as a conversation.

    A ``CachePoint`` block of any type is a place up to which the prompt is kept; before all text
    of the first message there is nothing to keep.

    Raises:
        PromptError: A block that holds no text, such as an image; a ``ttl`` that is no time; or a
            tool without a function.
    """
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise PromptError(f"tools are {tools!r:.200}; give a list, in OpenAI's form")
    return Conversation(
        tuple(_to_message(message, is_first=not i) for i, message in enumerate(messages)),
        tuple(_to_tool(tool) for tool in tools or ()),
    )


def _to_message(message: ChatMessage, *, is_first: bool) -> PcRagMessage:
    role = _ROLES[message.role]
    texts: list[str] = []
    calls: list[ToolCall] = []
    points: list[PcRagCachePoint] = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            calls.append(_to_call(block))
        elif isinstance(block, CachePoint):
            offset = len(_BLOCK_SEPARATOR.join(texts))
            if offset or not is_first:
                points.append(PcRagCachePoint(offset, parse_ttl(block.cache_control.ttl)))
        elif isinstance(block, ThinkingBlock):
            continue  # templates drop earlier thoughts
        else:
            texts.append(_text_of(block, role))
    extra = message.additional_kwargs
    known = {call.id for call in calls if call.id}
    calls += [call for call in _openai_calls(extra.get("tool_calls") or ()) if call.id not in known]
    return PcRagMessage(
        role=role,
        content=_BLOCK_SEPARATOR.join(texts),
        tool_calls=tuple(calls),
        tool_call_id=str(extra.get("tool_call_id") or ""),
        name=str(extra.get("name") or ""),
        cache_points=tuple(points),
    )


def _text_of(block: ContentBlock, role: Role) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, CitableBlock):
        return _BLOCK_SEPARATOR.join(_text_of(each, role) for each in block.content)
    if isinstance(block, CitationBlock):
        return _text_of(block.cited_content, role)
    if isinstance(block, DocumentBlock):
        return _document_text(block, role)
    raise PromptError(
        f"content of a {role} message: a block of type {block.block_type!r} holds no text; a text "
        "model takes text, no images, audio, video or binary documents: write what it says in a "
        "TextBlock"
    )


def _document_text(block: DocumentBlock, role: Role) -> str:
    name = f"document {block.title!r} of a {role} message"
    if not block.data and not block.path and not block.url:
        return ""
    try:
        content: bytes = block.resolve_document().read()
        text = content.decode()
    except (OSError, ValueError) as error:  # not there, empty, or not UTF-8
        raise PromptError(
            f"{name} ({block.document_mimetype or 'of unknown type'}) cannot be read as text: "
            f"{error}; a text model takes text: write what it says in a TextBlock"
        ) from error
    if "\0" in text:
        raise PromptError(
            f"{name} ({block.document_mimetype or 'of unknown type'}) is no text but binary; write "
            "what it says in a TextBlock"
        )
    return text


def _to_call(block: ToolCallBlock) -> ToolCall:
    return ToolCall(
        block.tool_name, _arguments(block.tool_kwargs, block.tool_name), block.tool_call_id or ""
    )


def _openai_calls(calls: Iterable[Any]) -> Iterator[ToolCall]:
    """Calls in OpenAI's form, as other models and older histories keep them."""
    for call in calls:
        plain = call.model_dump() if isinstance(call, BaseModel) else call
        function = (plain.get("function") or plain) if isinstance(plain, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            raise PromptError(
                f"a tool call in additional_kwargs has no function with a name: {call!r:.200}; "
                "give a ToolCallBlock, or OpenAI's form"
            )
        name = str(function["name"])
        arguments = _arguments(function.get("arguments") or {}, name)
        yield ToolCall(name, arguments, str(plain.get("id") or ""))


def _arguments(given: object, name: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        arguments = json.loads(str(given) or "{}")
    except ValueError as error:
        raise PromptError(f"the arguments of a call of {name!r} are not JSON: {given!r}") from error
    if not isinstance(arguments, dict):
        raise PromptError(f"the arguments of a call of {name!r} are no JSON object: {given!r}")
    return arguments


def _to_tool(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, dict) or not function.get("name"):
        raise PromptError(
            f"tool {tool!r} has no function with a name; give OpenAI's form, as "
            "tool.metadata.to_openai_tool() writes it, or call chat_with_tools"
        )
    return ToolSpec(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
    )


def raw_of(reply: Reply) -> dict[str, Any]:
    """What every final response has as ``raw``: JSON-safe; token counters read ``usage``."""
    metrics = reply.completion.metrics
    raw: dict[str, Any] = {
        "model": reply.model_name,
        "finish_reason": reply.finish_reason,
        "ttft_seconds": metrics.ttft_seconds,
        "usage": {
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.num_generated_tokens,
            "total_tokens": metrics.prompt_tokens + metrics.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": metrics.num_cache_read_tokens},
            "cache_creation_tokens": metrics.num_cache_creation_tokens,
        },
        "pc_rag": metrics.to_dict(),
    }
    if reply.invalid_tool_calls:
        raw["invalid_tool_calls"] = [
            {"args": call.raw, "error": call.error} for call in reply.invalid_tool_calls
        ]
    return raw


def full_text(reply: Reply) -> str:
    """What the model said, with what was meant as a call of a tool and is none.

    LlamaIndex's messages have no place for such a call: an agent would end with an empty answer,
    and the model could not see in its next turn what it had written. Beside valid calls it is left
    out; ``raw["invalid_tool_calls"]`` has it, and its reason, in any case.
    """
    written = [] if reply.tool_calls else [call.raw for call in reply.invalid_tool_calls]
    return _BLOCK_SEPARATOR.join([*([reply.text] if reply.text else ()), *written])


def invalid_reasons(response: ChatResponse) -> str:
    """What is wrong with the calls that are none, for an error's message; empty without any."""
    raw = response.raw if isinstance(response.raw, dict) else {}
    reasons = [call["error"] for call in raw.get("invalid_tool_calls", ())]
    return f" ({'; '.join(reasons)})" if reasons else ""


def with_joined_lists(prompt_args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a prompt, lists of texts joined.

    ``SimpleSummarize`` gives its context as a list, which a template would write as Python does:
    with brackets, quotes and escapes in which no chunk stands verbatim.
    """
    return {
        name: "\n".join(value)
        if isinstance(value, list) and all(isinstance(each, str) for each in value)
        else value
        for name, value in prompt_args.items()
    }


def chat_piece(text: str, delta: str) -> ChatResponse:
    """A piece of a streamed answer.

    Args:
        text: All that came so far.
        delta: What is new.
    """
    return ChatResponse(message=_answer(text), delta=delta)


def chat_response(reply: Reply, *, delta: str | None = None) -> ChatResponse:
    """A whole answer; the last piece of a streamed one has an empty ``delta``.

    Its calls stand in blocks, and once more in ``additional_kwargs`` in OpenAI's form, where
    LlamaIndex's streaming programs look for them.
    """
    message = _answer(full_text(reply))
    if reply.tool_calls:
        message.additional_kwargs["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in reply.tool_calls
        ]
    message.blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))
        for call in reply.tool_calls
    ]
    return ChatResponse(message=message, raw=raw_of(reply), delta=delta)


def tool_selections(response: ChatResponse) -> list[ToolSelection]:
    """The calls of tools in a response, as LlamaIndex runs them."""
    return [
        ToolSelection(
            tool_id=block.tool_call_id or block.tool_name,
            tool_name=block.tool_name,
            tool_kwargs=_arguments(block.tool_kwargs, block.tool_name),
        )
        for block in response.message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def completion_piece(text: str, delta: str) -> CompletionResponse:
    """As ``chat_piece``."""
    return CompletionResponse(text=text, delta=delta)


def completion_response(reply: Reply, *, delta: str | None = None) -> CompletionResponse:
    """As ``chat_response``."""
    return CompletionResponse(text=full_text(reply), raw=raw_of(reply), delta=delta)


def _answer(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)
