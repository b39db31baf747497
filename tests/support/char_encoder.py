"""A text encoder whose tokens are characters, so that counts and texts can be read off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.types import Role

if TYPE_CHECKING:
    from pc_rag.types import TokenIds

FIRST_CONTROL_ID = 0x110000
BOS = FIRST_CONTROL_ID
GENERATE = FIRST_CONTROL_ID + 1
PLACEHOLDER = ord("\N{REPLACEMENT CHARACTER}")
_NAMES = {BOS: "<bos>", GENERATE: "<generate>"}
_OPEN = {role: FIRST_CONTROL_ID + 2 + i for i, role in enumerate(Role)}
_CLOSE = {role: FIRST_CONTROL_ID + 10 + i for i, role in enumerate(Role)}
_NAMES |= {token_id: f"<{role}>" for role, token_id in _OPEN.items()}
_NAMES |= {token_id: f"</{role}>" for role, token_id in _CLOSE.items()}


class CharEncoder:
    """One token a character, one a control token; control tokens lie above all characters."""

    def __init__(self, *, has_bos: bool = True) -> None:
        self._has_bos = has_bos

    def encode_text(self, text: str) -> TokenIds:
        return tuple(map(ord, text))

    def beginning(self) -> TokenIds:
        return (BOS,) if self._has_bos else ()

    def role_open(self, role: Role, *, is_first: bool) -> TokenIds:
        return (_OPEN[role],)

    def role_close(self, role: Role) -> TokenIds:
        return (_CLOSE[role],)

    def generation_prompt(self) -> TokenIds:
        return (GENERATE,)

    def placeholder_id(self) -> int:
        return PLACEHOLDER

    def space_id(self) -> int:
        return ord(" ")


def decode(token_ids: TokenIds) -> str:
    """The characters, with control tokens as tags."""
    return "".join(_NAMES.get(i) or chr(i) for i in token_ids)
