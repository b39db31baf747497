"""The text of an answer, out of whatever a chain streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from langchain_core.messages import BaseMessage, BaseMessageChunk

_ANSWER_KEYS: Final = ("answer", "result", "output", "output_text", "text")
"""Where chains that return dictionaries put their answer, the likeliest first."""


class AnswerText:
    """Gathers the answer of one stream.

    Takes texts, messages, dictionaries with an answer in them (pieces of it, or all of it at
    once), and the updates of a graph, whose last AI message is the answer. Of anything else the
    last piece is shown as it prints.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._whole: str | None = None

    @property
    def value(self) -> str:
        """The answer so far."""
        return "".join(self._pieces) if self._whole is None else self._whole

    def add(self, piece: object) -> None:
        """Take what the chain gave next."""
        if isinstance(piece, str):
            self._pieces.append(piece)
        elif isinstance(piece, BaseMessageChunk):
            self._pieces.append(str(piece.text))
        elif isinstance(piece, BaseMessage):
            self._whole = str(piece.text)
        elif isinstance(piece, Mapping):
            self._add_mapping(piece)
        elif piece is not None:
            self._whole = str(piece)

    def _add_mapping(self, piece: Mapping[object, object]) -> None:
        for key in _ANSWER_KEYS:
            if isinstance(piece.get(key), (str, BaseMessage)):
                self.add(piece[key])
                return
        message = _last_ai_message(piece)
        if message is not None:
            self._whole = str(message.text)


def _last_ai_message(piece: Mapping[object, object]) -> BaseMessage | None:
    """The last AI message in a graph's state, or in the updates of its nodes."""
    found = None
    for state in (piece, *piece.values()):
        messages = state.get("messages") if isinstance(state, Mapping) else None
        if isinstance(messages, Sequence):
            for message in messages:
                if isinstance(message, BaseMessage) and message.type == "ai":
                    found = message
    return found
