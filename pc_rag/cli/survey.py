"""What lies in a disk tier's folder, measured from the files themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pc_rag.errors import CorruptEntry
from pc_rag.kv.entry_folder import EntryFolder
from pc_rag.kv.file_format import EntryHeader, read_header
from pc_rag.types import StorageDtype

if TYPE_CHECKING:
    from collections.abc import Sequence
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
        num_texts: Different texts that they hold: chunks, scaffolds, prefixes, modules.
        num_starts: Starts that each text is held at, of all texts together.
        most_starts: Starts that one text is held at, at most. More than 1 where positions are
            learned and texts were asked for at several places, or stand behind several prefixes.
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
    num_texts: int
    num_starts: int
    most_starts: int

    @property
    def mean_starts(self) -> float:
        """Starts that a text is held at, on average."""
        return self.num_starts / self.num_texts if self.num_texts else 0.0

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
        derived = {
            "bytes_per_token": self.bytes_per_token,
            "overhead": self.overhead,
            "mean_starts": self.mean_starts,
        }
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


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read of one file: where its text was encoded, and what tells texts apart."""

    header: EntryHeader
    start: int
    text: str


def survey(kv_folder: Path) -> Survey:
    """Read the header of every entry; no tensor is read."""
    folder = EntryFolder(kv_folder)
    headers: list[_Read] = []
    num_unreadable = 0
    for found in folder.scan():
        try:
            with folder.open(found.name) as file:
                header = read_header(file)
                headers.append(_Read(header, header.start, found.name.content_id))
        except CorruptEntry:
            num_unreadable += 1
        except FileNotFoundError:
            continue  # evicted by another process since the scan
    by_model: dict[tuple[str, str], list[_Read]] = {}
    for read in headers:
        key = (read.header.metadata.get("fingerprint", ""), read.header.dtype.value)
        by_model.setdefault(key, []).append(read)
    models = [_summed(fingerprint, group) for (fingerprint, _), group in by_model.items()]
    models.sort(key=lambda entries: (-entries.file_bytes, entries.fingerprint))
    return Survey(tuple(models), num_unreadable)


def _summed(fingerprint: str, group: Sequence[_Read]) -> ModelEntries:
    headers = [read.header for read in group]
    starts = Counter(text for text, _ in {(read.text, read.start) for read in group})
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
        num_texts=len(starts),
        num_starts=starts.total(),
        most_starts=max(starts.values()),
    )
