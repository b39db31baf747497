"""What lies in a disk tier's folder, measured from the files themselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pc_rag.errors import CorruptEntry
from pc_rag.kv.entry_folder import EntryFolder
from pc_rag.kv.file_format import EntryHeader, read_header
from pc_rag.types import StorageDtype

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_ITEM_BYTES = {StorageDtype.FLOAT32: 4, StorageDtype.BFLOAT16: 2, StorageDtype.FLOAT16: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntries:
    """The entries of one model and dtype.

    Attributes:
        fingerprint: The model.
        dtype: Numeric type as stored.
        num_layers: Layers that keep keys and values.
        num_kv_heads: Key/value heads per layer.
        head_dim: Channels of a key head.
        theory_bytes_per_token: 2 · layers · kv_heads · head_dim · bytes of the dtype.
        num_entries: Files.
        num_tokens: Tokens in them.
        file_bytes: Their sizes.
    """

    fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    theory_bytes_per_token: int
    num_entries: int
    num_tokens: int
    file_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk for each token."""
        return self.file_bytes / self.num_tokens if self.num_tokens else 0.0

    @property
    def overhead(self) -> float:
        """How much more than theory the disk holds, as a share of it."""
        return self.bytes_per_token / self.theory_bytes_per_token - 1 if self.num_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every field and derived number, as JSON can say them."""
        derived = {"bytes_per_token": self.bytes_per_token, "overhead": self.overhead}
        return {**asdict(self), **derived}


@dataclass(frozen=True, slots=True)
class Survey:
    """All entries of a folder.

    Attributes:
        models: By model and dtype, the one with most bytes first.
        num_unreadable: Files whose header is damaged; ``pc-rag check`` sets them aside.
    """

    models: tuple[ModelEntries, ...]
    num_unreadable: int


def survey(kv_folder: Path) -> Survey:
    """Read the header of every entry; no tensor is read."""
    folder = EntryFolder(kv_folder)
    headers: list[EntryHeader] = []
    num_unreadable = 0
    for found in folder.scan():
        try:
            with folder.open(found.name) as file:
                headers.append(read_header(file))
        except CorruptEntry:
            num_unreadable += 1
        except FileNotFoundError:
            continue  # evicted by another process since the scan
    by_model: dict[tuple[str, str], list[EntryHeader]] = {}
    for header in headers:
        key = (header.metadata.get("fingerprint", ""), header.dtype.value)
        by_model.setdefault(key, []).append(header)
    models = [_summed(fingerprint, group) for (fingerprint, _), group in by_model.items()]
    models.sort(key=lambda entries: (-entries.file_bytes, entries.fingerprint))
    return Survey(tuple(models), num_unreadable)


def _summed(fingerprint: str, headers: Iterable[EntryHeader]) -> ModelEntries:
    headers = list(headers)
    num_layers, num_kv_heads, _, key_dim = headers[0].keys_shape
    *_, value_dim = headers[0].values_shape
    channels = num_layers * num_kv_heads * (key_dim + value_dim)
    return ModelEntries(
        fingerprint=fingerprint,
        dtype=headers[0].dtype.value,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=key_dim,
        theory_bytes_per_token=channels * _ITEM_BYTES[headers[0].dtype],
        num_entries=len(headers),
        num_tokens=sum(header.num_tokens for header in headers),
        file_bytes=sum(header.file_bytes for header in headers),
    )
