"""What layout asks of a tokenizer and its chat template. The engine implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pc_rag.types import Role, TokenIds


class TextEncoder(Protocol):
    """Turns text and turns of a chat into token ids.

    Only ``beginning``, ``role_open``, ``role_close`` and ``generation_prompt`` may yield control
    tokens. All are deterministic: the same arguments give the same ids.
    """

    def encode_text(self, text: str) -> TokenIds:
        """The ids of plain text, without BOS or EOS; special tokens in it stay plain text."""
        ...

    def beginning(self) -> TokenIds:
        """What every prompt begins with: BOS, or nothing."""
        ...

    def role_open(self, role: Role, *, is_first: bool) -> TokenIds:
        """What opens a turn.

        Args:
            role: Who speaks.
            is_first: No turn came before; some templates put a default system text there.
        """
        ...

    def role_close(self, role: Role) -> TokenIds:
        """What closes a turn."""
        ...

    def generation_prompt(self) -> TokenIds:
        """What opens the turn that the model is to write."""
        ...

    def placeholder_id(self) -> int:
        """What stands for a parameter while its module is encoded: the most neutral token."""
        ...

    def space_id(self) -> int:
        """The token that fills up arguments of parameters that pad with spaces."""
        ...
