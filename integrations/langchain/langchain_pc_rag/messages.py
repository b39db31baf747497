"""LangChain's messages and tools to a conversation, and replies to LangChain's messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import (
    ChatMessage as LangChainChatMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_pc_rag.chunks import message_chunks, message_points
from langchain_pc_rag.settings import PROVIDER
from pc_rag.errors import PromptError
from pc_rag.model.conversation import ChatMessage, Conversation, ToolCall, ToolSpec
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from langchain_core.messages import BaseMessage, InvalidToolCall

    from pc_rag.serving import Reply

_ROLES = {
    SystemMessage: Role.SYSTEM,
    HumanMessage: Role.USER,
    AIMessage: Role.ASSISTANT,
    ToolMessage: Role.TOOL,
    FunctionMessage: Role.TOOL,
}
_ROLE_NAMES = {"human": Role.USER, "ai": Role.ASSISTANT, "developer": Role.SYSTEM}


def to_conversation(
    messages: Iterable[BaseMessage], tools: Sequence[Any] | None = None
) -> Conversation:
    """LangChain's messages and tools as a conversation.

    Raises:
        PromptError: A message of an unknown role or kind, or with content that is not text.
    """
    return Conversation(
        tuple(_to_message(message) for message in messages),
        tuple(to_tool_spec(tool) for tool in tools or ()),
    )


def to_tool_spec(tool: Any) -> ToolSpec:
    """A tool of any form that LangChain knows.

    Raises:
        PromptError: A tool that only its provider can run.
    """
    converted = convert_to_openai_tool(tool)
    if "function" not in converted:
        raise PromptError(
            f"tool {converted!r} is a provider's own and runs on its servers; a local model can "
            "call functions only"
        )
    function = converted["function"]
    return ToolSpec(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
    )


def _to_message(message: BaseMessage) -> ChatMessage:
    content, chunks = message_chunks(message)
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    if isinstance(message, AIMessage) and message.invalid_tool_calls and not calls:
        # What the model wrote instead of a call: without it, it could not see what went wrong.
        written = "\n".join(_written(call) for call in message.invalid_tool_calls)
        content = f"{content}\n{written}" if content else written
    return ChatMessage(
        role=_role_of(message),
        content=content,
        chunks=chunks,
        cache_points=message_points(message),
        tool_calls=tuple(ToolCall(c["name"], c["args"], c.get("id") or "") for c in calls),
        tool_call_id=message.tool_call_id if isinstance(message, ToolMessage) else "",
        name=message.name or "",
    )


def _role_of(message: BaseMessage) -> Role:
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    if isinstance(message, LangChainChatMessage):
        name = message.role.lower()
        if name in _ROLE_NAMES:
            return _ROLE_NAMES[name]
        if name in set(Role):
            return Role(name)
        raise PromptError(f"role {message.role!r} is unknown; use one of {', '.join(Role)}")
    raise PromptError(
        f"a {type(message).__name__} cannot be shown to a model; give system, human, AI and tool "
        "messages"
    )


def generation_info(reply: Reply) -> dict[str, Any]:
    """What LangChain puts into ``response_metadata``: JSON-safe."""
    metrics = reply.completion.metrics
    info: dict[str, Any] = {
        "model_name": reply.model_name,
        "model_provider": PROVIDER,
        "finish_reason": reply.finish_reason,
        "ttft_seconds": metrics.ttft_seconds,
        "pc_rag": metrics.to_dict(),
    }
    if reply.invalid_tool_calls:  # chunks of a streamed message have no room for the reasons
        info["invalid_tool_calls"] = [
            {"args": call.raw, "error": call.error} for call in reply.invalid_tool_calls
        ]
    return info


def usage_metadata(reply: Reply) -> UsageMetadata:
    """Tokens of a reply; those read from entries and those whose entries were made are details."""
    metrics = reply.completion.metrics
    return UsageMetadata(
        input_tokens=metrics.prompt_tokens,
        output_tokens=metrics.num_generated_tokens,
        total_tokens=metrics.prompt_tokens + metrics.num_generated_tokens,
        input_token_details=InputTokenDetails(
            cache_read=metrics.num_cache_read_tokens,
            cache_creation=metrics.num_cache_creation_tokens,
        ),
    )


def to_ai_message(reply: Reply) -> AIMessage:
    """A reply as a message."""
    return AIMessage(
        content=reply.text,
        tool_calls=[
            tool_call(name=call.name, args=dict(call.arguments), id=call.id)
            for call in reply.tool_calls
        ],
        invalid_tool_calls=_invalid_calls(reply),
        usage_metadata=usage_metadata(reply),
    )


def _written(call: InvalidToolCall) -> str:
    """What the model wrote; a streamed message holds it as a JSON string, see ``last_chunk``."""
    args = call["args"] or ""
    try:
        value = json.loads(args)
    except ValueError:
        return args
    return value if isinstance(value, str) else args


def _invalid_calls(reply: Reply) -> list[InvalidToolCall]:
    return [
        invalid_tool_call(name=None, args=call.raw, id=None, error=call.error)
        for call in reply.invalid_tool_calls
    ]


def last_chunk(reply: Reply) -> AIMessageChunk:
    """What stands at the end of a streamed reply: its calls of tools, and what it cost.

    LangChain makes a message's calls out of its chunks of calls, and mends JSON on the way. An
    invalid call is given as a JSON string, which no mending turns into arguments.
    """
    calls = [(call.name, json.dumps(call.arguments), call.id) for call in reply.tool_calls]
    calls += [("", json.dumps(call.raw), "") for call in reply.invalid_tool_calls]
    return AIMessageChunk(
        content="",
        tool_call_chunks=[
            tool_call_chunk(name=name or None, args=args, id=call_id or None, index=index)
            for index, (name, args, call_id) in enumerate(calls)
        ],
        usage_metadata=usage_metadata(reply),
        chunk_position="last",
    )
