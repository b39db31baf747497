"""What a store knows of an entry without reading it, and the file name that carries it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pc_rag.types import ModuleKey

if TYPE_CHECKING:
    from pc_rag.kv.key import EntryAddress

_MODEL_ID_HEX_DIGITS = 12
_FILE_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.([0-9a-f]{12})\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class EntryName:
    """The name of an entry: enough to find it, and to say why another one is missing.

    Attributes:
        key: What names the entry.
        content_id: 16 hex digits over tenant and token ids.
        model_id: 12 hex digits over fingerprint and dtype. Two entries that share ``content_id``
            and ``model_id`` but not ``key`` were encoded behind another prefix or at another start.
    """

    key: ModuleKey
    content_id: str
    model_id: str

    @classmethod
    def of(cls, address: EntryAddress) -> Self:
        """The name of the entry at an address."""
        model = f"{address.fingerprint}/{address.dtype.value}"
        model_id = hashlib.sha256(model.encode()).hexdigest()[:_MODEL_ID_HEX_DIGITS]
        return cls(address.key, address.content_id, model_id)

    @classmethod
    def parse(cls, file_name: str) -> Self | None:
        """The name that a file carries; ``None`` where it is no entry's file."""
        match = _FILE_NAME.fullmatch(file_name)
        return None if match is None else cls(ModuleKey(match[1]), match[2], match[3])

    @property
    def file_name(self) -> str:
        """``<key>.<content_id>.<model_id>.safetensors``."""
        return f"{self.key}.{self.content_id}.{self.model_id}.safetensors"
