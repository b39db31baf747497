r"""How a model writes calls of tools, read off its chat template.

A message with a probe call is rendered; the JSON object that holds the probe's name and arguments
is looked for in it, and what stands around it is the format::

    <|im_start|>assistant\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n
    the turn              prefix       the JSON                        suffix        the turn

No model's name is known here. A template that writes calls otherwise than as JSON has no format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pc_rag.errors import PromptError
from pc_rag.model.conversation import ToolSpec
from pc_rag.model.template_input import TemplateRefusal, call_entry, tool_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pc_rag.model.tokenizer import TextTokenizer

_PROBE_USER = {"role": "user", "content": "probe"}
_PROBE_TEXT = "pcRagProbeText"
_CALLS: tuple[dict[str, Any], ...] = (
    {"id": "pcRagId01", "name": "pc_rag_probe", "arguments": {"pc_rag_key": "pc_rag_value"}},
    {"id": "pcRagId02", "name": "pc_rag_other", "arguments": {"pc_rag_key": "again"}},
)
"""Nine letters and digits name a call: some templates refuse other identifiers."""
PROBE_NAME = "pc_rag_probe"
"""A name that no template knows."""
PROBE_TOOLS = tuple(
    tool_entry(
        ToolSpec(
            call["name"],
            "A probe.",
            {
                "type": "object",
                "properties": {"pc_rag_key": {"type": "string", "description": "A key."}},
                "required": ["pc_rag_key"],
            },
        )
    )
    for call in _CALLS
)
"""The tools that the probe calls are calls of."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls stand in an assistant's answer.

    Attributes:
        prefix: Text before the JSON of a call (of the list, where calls stand in one).
        suffix: Text behind it, without what ends the turn.
        separator: Text between the suffix of a call and the prefix of the next; empty in a list;
            ``None`` where the template writes only one call.
        name_key: Key of the tool's name.
        arguments_key: Key of the arguments.
        is_list: Whether calls stand in one JSON list, also a single one.
        hidden: Texts of special tokens among these, which are not in the text of an answer.
    """

    prefix: str
    suffix: str
    separator: str | None
    name_key: str
    arguments_key: str
    is_list: bool = False
    hidden: tuple[str, ...] = ()

    @property
    def text_prefix(self) -> str:
        """The prefix as the text of an answer has it."""
        return self._visible(self.prefix)

    @property
    def text_suffix(self) -> str:
        """The suffix as the text of an answer has it."""
        return self._visible(self.suffix)

    @property
    def opener(self) -> str:
        """What announces a call in the text of an answer; empty where only the JSON does."""
        return self.text_prefix.strip()

    @property
    def closer(self) -> str:
        """What ends a call in the text of an answer; may be empty."""
        return self.text_suffix.strip()

    @property
    def text_separator(self) -> str:
        """The separator as the text of an answer has it."""
        return self._visible(self.separator or "")

    def _visible(self, text: str) -> str:
        for special in self.hidden:
            text = text.replace(special, "")
        return text


class ForcedCall(NamedTuple):
    """What an answer that is one call looks like: text, JSON by a schema, text."""

    prefix: str
    schema: dict[str, Any]
    suffix: str


def tool_call_schema(
    tool_format: ToolFormat, tools: Sequence[ToolSpec], choice: str | None = None
) -> ForcedCall:
    """What an answer must look like that calls exactly one tool.

    Args:
        tool_format: How the model writes calls.
        tools: What may be called.
        choice: Name of the tool that must be called; ``None`` for any of them.

    Returns:
        Prefix and suffix as the text of an answer has them, without special tokens; and the JSON
        schema of the object between them, or of a list that holds it.

    Raises:
        PromptError: No tools, or ``choice`` is none of them.
    """
    chosen = [tool for tool in tools if choice is None or tool.name == choice]
    if not chosen:
        known = ", ".join(repr(tool.name) for tool in tools) or "none"
        raise PromptError(
            f"a call of {choice or 'any tool'!r} is demanded, but the tools are: {known}; name one "
            f"of them, or give tools"
        )
    definitions: dict[str, Any] = {}
    schemas = [_call_schema(tool_format, tool, definitions) for tool in chosen]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if tool_format.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    if definitions:
        schema = {**schema, "$defs": definitions}
    return ForcedCall(tool_format.text_prefix, schema, tool_format.text_suffix)


def _call_schema(
    tool_format: ToolFormat, tool: ToolSpec, definitions: dict[str, Any]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"type": "object", **tool.parameters}
    if _has_reference(arguments):
        # References count from the root of a schema: the whole of it becomes a definition.
        key = f"arguments{len(definitions)}"
        definitions[key] = _moved(arguments, f"#/$defs/{key}")
        arguments = {"$ref": f"#/$defs/{key}"}
    return {
        "type": "object",
        "properties": {
            tool_format.name_key: {"const": tool.name},
            tool_format.arguments_key: arguments,
        },
        "required": [tool_format.name_key, tool_format.arguments_key],
        "additionalProperties": False,
    }


def _has_reference(schema: object) -> bool:
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        is_local = isinstance(reference, str) and reference.startswith("#")
        return is_local or any(map(_has_reference, schema.values()))
    return isinstance(schema, list | tuple) and any(map(_has_reference, schema))


def _moved(schema: Any, root: str) -> Any:  # noqa: ANN401 - any part of a schema
    """A schema whose references count from another root."""
    if isinstance(schema, dict):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved
    return [_moved(item, root) for item in schema] if isinstance(schema, list | tuple) else schema


# -- reading the format off a template --------------------------------------------------------


class _FoundCall(NamedTuple):
    """Where the JSON of a call stands in a text, and how it is written."""

    start: int
    end: int
    name_key: str
    arguments_key: str
    is_list: bool


Render: TypeAlias = "Callable[..., str]"
"""Renders messages with the probe tools; raises ``TemplateRefusal``."""


def shows_probe_call(render: Render, *, as_text: bool) -> bool:
    """Whether a template writes a call at all, in whatever way.

    Args:
        render: Renders messages with the probe tools.
        as_text: Give the arguments as JSON text.
    """
    text = _render_calls(render, _CALLS[:1], as_text=as_text)
    return all(value in text for value in _CALLS[0]["arguments"].values())


def shows_json_call(render: Render, *, as_text: bool) -> bool:
    """Whether a template writes a call as a JSON object that holds its arguments as an object.

    Args:
        render: Renders messages with the probe tools.
        as_text: Give the arguments as JSON text.
    """
    return _find_call(_render_calls(render, _CALLS[:1], as_text=as_text), _CALLS[0]) is not None


def derive_tool_format(
    render: Render, tokenizer: TextTokenizer, *, as_text: bool
) -> ToolFormat | None:
    """Read a template's format of calls off its rendering.

    Args:
        render: Renders messages with the probe tools.
        tokenizer: Tells what ends a turn, and special tokens.
        as_text: Give the arguments as JSON text.

    Returns:
        ``None`` where the template refuses calls, or writes them otherwise than as JSON.
    """
    text = _render_calls(render, _CALLS[:1], as_text=as_text)
    found = _find_call(text, _CALLS[0])
    if found is None:
        return None
    try:
        opening, closing = _turn_of(render)
    except TemplateRefusal:
        return None
    start = next((len(o) for o in opening if text[: found.start].startswith(o)), None)
    if start is None:
        start = _num_common(text[: found.start], opening[0])
    prefix = text[start : found.start]
    suffix = _without_end(text[found.end :], closing, tokenizer)
    separator = "" if found.is_list else _find_separator(render, prefix, suffix, as_text=as_text)
    around = prefix + suffix + (separator or "")
    hidden = tuple(special for special in tokenizer.special_texts if special in around)
    return ToolFormat(
        prefix, suffix, separator, found.name_key, found.arguments_key, found.is_list, hidden
    )


def _render_calls(render: Render, calls: Sequence[Mapping[str, Any]], *, as_text: bool) -> str:
    """A conversation that ends in probe calls; nothing where the template refuses it."""
    entries = [call_entry(call, as_text=as_text) for call in calls]
    try:
        return render([_PROBE_USER, {"role": "assistant", "content": "", "tool_calls": entries}])
    except TemplateRefusal:
        return ""


def _turn_of(render: Render) -> tuple[tuple[str, ...], str]:
    """How an assistant's turn may begin, longest first, and how one of plain text ends."""
    prompt = render([_PROBE_USER], add_generation_prompt=True)
    plain = render([_PROBE_USER, {"role": "assistant", "content": _PROBE_TEXT}])
    before, _, behind = plain.partition(_PROBE_TEXT)
    return tuple(sorted((before, prompt), key=len, reverse=True)), behind


def _num_common(left: str, right: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _without_end(text: str, closing: str, tokenizer: TextTokenizer) -> str:
    if closing:
        text = text.removesuffix(closing)
    ends = [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.eos_ids]
    starts = [text.find(end) for end in ends if end and end in text]
    return text[: min(starts)] if starts else text


def _find_separator(render: Render, prefix: str, suffix: str, *, as_text: bool) -> str | None:
    text = _render_calls(render, _CALLS, as_text=as_text)
    first, second = (_find_call(text, call) for call in _CALLS)
    if first is None or second is None or first.end > second.start:
        return None
    between = text[first.end : second.start]
    is_wrapped = between.startswith(suffix) and between[len(suffix) :].endswith(prefix)
    return between[len(suffix) : len(between) - len(prefix)] if is_wrapped else between


def _find_call(text: str, call: Mapping[str, Any]) -> _FoundCall | None:
    """The first JSON in a text that is the call, or a list of it."""
    for start, end, value in _json_values(text):
        is_list = isinstance(value, list)
        candidates = value if isinstance(value, list) else [value]
        if is_list and len(candidates) != 1:
            continue
        keys = _keys_of(candidates[0], call)
        if keys is not None:
            return _FoundCall(start, end, *keys, is_list)
    return None


def _keys_of(value: object, call: Mapping[str, Any]) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    names = [key for key, item in value.items() if item == call["name"]]
    arguments = [key for key, item in value.items() if item == call["arguments"]]
    return (names[0], arguments[0]) if names and arguments else None


def _json_values(text: str) -> Iterator[tuple[int, int, object]]:
    """Every JSON object and list in a text with its span, outer ones first."""
    decoder = json.JSONDecoder()
    for start, character in enumerate(text):
        if character not in "{[":
            continue
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        yield start, end, value
