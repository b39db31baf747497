"""Calls of tools, read out of an answer while it is generated.

::

    BETWEEN --opener--> OPEN --bracket--> JSON --its end--> BETWEEN
       |                  |                 |
       |                  +---malformed-----+--> BROKEN --closer--> BETWEEN
       +--bracket without opener--> JSON
       +--other text--> TEXT --opener--> OPEN

Text that only mentions the opener is given back: neither JSON nor a closer follows it.

A call without an opener is looked for at the start of an answer and right behind another call:
openers that are special tokens never appear in text. Such JSON is text again if it is no call.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from pc_rag.model.conversation import ToolCall
from pc_rag.model.json_scan import JsonScanner, Scan, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pc_rag.model.conversation import ToolSpec
    from pc_rag.model.tool_format import ToolFormat

DEFAULT_MAX_CALL_CHARS = 1 << 16
"""A longer call is invalid; longer JSON without an opener is text."""
_MAX_DEPTH = 64
_SIDE_KEYS = ("id", "type")
"""Keys that models put before the name without being asked."""


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """What was meant as a call and cannot be one.

    Attributes:
        raw: As the model wrote it, cut at the parser's limit.
        error: What is wrong, for the model or the developer.
    """

    raw: str
    error: str


@dataclass(frozen=True, slots=True)
class ParsedTools:
    """What an answer holds besides the text released before.

    Attributes:
        text: Text that was held back to the end and is no call.
        calls: Calls that fit their tools, in order.
        invalid: What was meant as a call and cannot be one, in order.
    """

    text: str
    calls: tuple[ToolCall, ...]
    invalid: tuple[InvalidToolCall, ...]


class _State(Enum):
    BETWEEN = auto()  # at the start of the answer, or right behind a call
    TEXT = auto()
    OPEN = auto()  # behind an opener
    JSON = auto()
    BROKEN = auto()  # malformed behind an opener; goes on to the closer


class ToolCallParser:
    """Splits a streamed answer into text and calls of tools.

    Nothing of a call is ever released as text; what only began like one is. White space that stands
    between text and a call is dropped. Work is linear in the text, and what is held back is bounded
    by ``max_call_chars``. Not for use by several threads at once.

    Args:
        tool_format: How the model writes calls.
        tools: What may be called; a call of anything else is invalid.
        make_id: Gives each call its identifier.
        max_call_chars: Longest JSON of a call, or of a list of calls.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[ToolSpec],
        *,
        make_id: Callable[[], str],
        max_call_chars: int = DEFAULT_MAX_CALL_CHARS,
    ) -> None:
        self._reader = _CallReader(tool_format, tools, make_id)
        self._opener = tool_format.opener
        self._closer = tool_format.closer
        self._separator = tool_format.text_separator.strip()
        self._bracket = "[" if tool_format.is_list else "{"
        self._max_call_chars = max_call_chars
        self._state = _State.BETWEEN
        self._queue: deque[str] = deque()
        self._released: list[str] = []
        self._space: list[str] = []  # white space that is dropped if a call follows
        self._candidate = ""  # what may become an opener, a closer or a separator
        self._raw: list[str] = []
        self._scanner = JsonScanner(_MAX_DEPTH)
        self._is_opened = False
        self._is_behind_call = False
        self._has_text = False
        self._fault = ""
        self._announced: list[str] = []  # the opener with the space around it
        self._may_be_mention = False

    def feed(self, text: str) -> str:
        """Take the next text and return what is safe to release.

        Args:
            text: Any text, also empty.
        """
        self._queue.extend(text)
        steps = {
            _State.BETWEEN: self._step_between,
            _State.TEXT: self._step_text,
            _State.OPEN: self._step_open,
            _State.JSON: self._step_json,
            _State.BROKEN: self._step_broken,
        }
        while self._queue:
            steps[self._state](self._queue.popleft())
        return self._take_released()

    def finish(self) -> ParsedTools:
        """End the answer. Feeding goes on only with another parser."""
        if self._state is _State.BROKEN and self._may_be_mention:
            self._release([*self._announced, *self._raw])
        elif self._state in (_State.OPEN, _State.BROKEN) or (
            self._state is _State.JSON and self._is_opened
        ):
            fault = self._fault or "the answer ends before the JSON of the call is complete"
            self._reader.refuse("".join(self._raw), fault)
        elif self._state is _State.JSON:
            raw = "".join(self._raw)
            if self._reader.names_tool(raw):
                self._reader.refuse(raw, "the answer ends before the JSON of the call is complete")
            else:
                self._release([*self._space, raw])
        elif not self._is_rest_of_call():
            self._release([*self._space, self._candidate])
        return ParsedTools(
            self._take_released(), tuple(self._reader.calls), tuple(self._reader.invalid)
        )

    def _is_rest_of_call(self) -> bool:
        """Whether what is held back ends a call: white space, or the beginning of a closer."""
        if self._state is _State.TEXT or not self._is_behind_call:
            return False
        return any(text.startswith(self._candidate) for text in (self._closer, self._separator))

    def _step_between(self, character: str) -> None:
        if not self._candidate and character.isspace():
            self._hold_space(character)
            return
        self._candidate += character
        skipped = (self._closer, self._separator) if self._is_behind_call else ()
        if self._candidate == self._opener:
            self._open()
        elif self._candidate in skipped:
            self._candidate = ""
            self._space.clear()
        elif not any(text.startswith(self._candidate) for text in (self._opener, *skipped)):
            begun, self._candidate = self._candidate, ""
            self._queue.extendleft(reversed(begun))
            if begun[0] == self._bracket:
                self._begin_json(is_opened=False)
            else:
                self._begin_text()

    def _step_text(self, character: str) -> None:
        candidate = self._candidate + character
        while candidate and not self._opener.startswith(candidate):
            if candidate[0].isspace():
                self._hold_space(candidate[0])
            else:
                self._release([*self._space, candidate[0]])
                self._space.clear()
            candidate = candidate[1:]
        self._candidate = candidate
        if candidate and candidate == self._opener:
            self._open()

    def _step_open(self, character: str) -> None:
        if character.isspace():
            self._announced.append(character)
            return
        self._queue.appendleft(character)
        if character in "{[":
            self._begin_json(is_opened=True)
        else:
            self._break("the call does not begin with JSON")
            self._may_be_mention = True

    def _step_json(self, character: str) -> None:
        self._raw.append(character)
        scan = self._scanner.advance(character)
        if scan is Scan.DONE:
            self._end_json()
        elif scan is Scan.BROKEN:
            self._reject("the JSON of the call is malformed")
        elif len(self._raw) >= self._max_call_chars:
            self._reject(f"the call is longer than {self._max_call_chars} characters")
        elif not self._is_opened and not self._reader.may_begin_with(self._scanner.first_text):
            self._reject("")

    def _step_broken(self, character: str) -> None:
        self._candidate = (self._candidate + character)[-max(len(self._closer), 1) :]
        self._may_be_mention = self._may_be_mention and character not in "{["
        if len(self._raw) < self._max_call_chars:
            self._raw.append(character)
        elif self._may_be_mention:
            self._queue.appendleft(character)
            self._release([*self._announced, *self._raw])
            self._candidate = ""
            self._begin_text(space=())
            return
        if self._candidate == self._closer:
            raw = "".join(self._raw).removesuffix(self._closer).strip()
            self._reader.refuse(raw, self._fault)
            self._begin_between()

    def _end_json(self) -> None:
        raw = "".join(self._raw)
        try:
            value = parse_json(raw)
        except ValueError as error:
            self._reject(f"the JSON of the call is malformed: {error}")
            return
        if self._is_opened or self._reader.is_call(value):
            self._reader.read(value, raw)
            self._begin_between()
        else:
            self._release([*self._space, raw])
            self._begin_text(space=())

    def _reject(self, fault: str) -> None:
        """What was scanned as JSON is none: text without an opener, else a broken call."""
        self._queue.extendleft(reversed(self._raw))
        if self._is_opened:
            self._break(fault)
        else:
            self._begin_text()

    def _open(self) -> None:
        self._state, self._candidate, self._fault = _State.OPEN, "", ""
        self._announced = [*self._space, self._opener]
        self._space.clear()
        self._raw = []

    def _break(self, fault: str) -> None:
        self._state, self._candidate, self._fault = _State.BROKEN, "", fault
        self._raw, self._may_be_mention = [], False

    def _begin_json(self, *, is_opened: bool) -> None:
        self._state, self._is_opened = _State.JSON, is_opened
        self._raw, self._scanner = [], JsonScanner(_MAX_DEPTH)

    def _begin_between(self) -> None:
        self._state, self._candidate, self._is_behind_call = _State.BETWEEN, "", True
        self._space.clear()
        self._raw = []

    def _begin_text(self, space: Iterable[str] | None = None) -> None:
        self._state = _State.TEXT
        if space is not None or (self._is_behind_call and not self._has_text):
            self._space = list(space or ())

    def _hold_space(self, character: str) -> None:
        self._space.append(character)
        if len(self._space) > self._max_call_chars:
            self._release(self._space)
            self._space.clear()

    def _release(self, texts: Iterable[str]) -> None:
        self._released += [text for text in texts if text]
        self._has_text = self._has_text or bool(self._released)

    def _take_released(self) -> str:
        text = "".join(self._released)
        self._released.clear()
        return text


class _CallReader:
    """Makes calls of JSON values, and says why a value is none."""

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[ToolSpec], make_id: Callable[[], str]
    ) -> None:
        self._format = tool_format
        self._tools = {tool.name: tool for tool in tools}
        self._make_id = make_id
        self._first_keys = {tool_format.name_key, tool_format.arguments_key, *_SIDE_KEYS}
        names = "|".join(re.escape(json.dumps(name)) for name in self._tools)
        key = re.escape(json.dumps(tool_format.name_key))
        self._named = re.compile(rf"{key}\s*:\s*(?:{names or '(?!)'})")
        self.calls: list[ToolCall] = []
        self.invalid: list[InvalidToolCall] = []

    def may_begin_with(self, first_text: str | None) -> bool:
        """Whether JSON with this first key may be a call; unknown yet where it is ``None``."""
        return first_text is None or first_text in self._first_keys

    def names_tool(self, raw: str) -> bool:
        """Whether incomplete JSON already names one of the tools."""
        return self._named.search(raw) is not None

    def is_call(self, value: object) -> bool:
        """Whether JSON that nothing announced has the form of a call."""
        if self._format.is_list:
            return isinstance(value, list) and bool(value) and all(map(self._has_keys, value))
        return self._has_keys(value)

    def read(self, value: object, raw: str) -> None:
        """Take a value that was meant as a call, or as a list of calls."""
        if not self._format.is_list:
            self._read_one(value, raw)
        elif not isinstance(value, list):
            self.refuse(raw, "calls must stand in a JSON list; got an object")
        else:
            for item in value:
                self._read_one(item, json.dumps(item, ensure_ascii=False))

    def refuse(self, raw: str, error: str) -> None:
        """Take what cannot be a call."""
        self.invalid.append(InvalidToolCall(raw, error))

    def _has_keys(self, value: object) -> bool:
        keys = {self._format.name_key, self._format.arguments_key}
        return isinstance(value, dict) and keys <= value.keys()

    def _read_one(self, value: object, raw: str) -> None:
        name_key, arguments_key = self._format.name_key, self._format.arguments_key
        if not isinstance(value, dict) or not self._has_keys(value):
            self.refuse(raw, f"a call is a JSON object with {name_key!r} and {arguments_key!r}")
            return
        name, arguments = value[name_key], value[arguments_key]
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(map(repr, self._tools)) or "none"
            self.refuse(raw, f"there is no tool {name!r}; the tools are: {known}")
        elif not isinstance(arguments, dict):
            got = json.dumps(arguments, ensure_ascii=False)
            self.refuse(raw, f"the arguments of {name!r} must be a JSON object; got {got}")
        elif fault := _misfit(arguments, tool):
            self.refuse(raw, fault)
        else:
            self.calls.append(ToolCall(tool.name, arguments, self._make_id()))


def _misfit(arguments: dict[str, object], tool: ToolSpec) -> str:
    """How arguments break the top level of a tool's schema; empty if they do not."""
    required = tool.parameters.get("required")
    needed = required if isinstance(required, list | tuple) else ()
    missing = [key for key in needed if key not in arguments]
    if missing:
        return f"the call of {tool.name!r} lacks the arguments: {', '.join(map(repr, missing))}"
    known = tool.parameters.get("properties") or {}
    patterns = tool.parameters.get("patternProperties") or {}
    unknown = [key for key in arguments if key not in known and not _fits_any(key, patterns)]
    if unknown and tool.parameters.get("additionalProperties") is False:
        allowed = ", ".join(map(repr, known)) or "none"
        return (
            f"the call of {tool.name!r} has unknown arguments: {', '.join(map(repr, unknown))}; "
            f"it takes: {allowed}"
        )
    return ""


def _fits_any(key: str, patterns: Iterable[str]) -> bool:
    """Whether a key fits a pattern; one that Python cannot read allows everything."""
    for pattern in patterns:
        try:
            if re.search(pattern, key):
                return True
        except re.error:
            return True
    return False
