"""One entry as one safetensors file; ``docs/disk-format.md`` is the specification.

    +--------+-----------------+------+--------+-----------+----------+
    | length | JSON, padded    | keys | values | token_ids | checksum |
    +--------+-----------------+------+--------+-----------+----------+
      8 bytes  a multiple of 64                  int32       4 bytes: CRC-32 of all before

The file is written and read here, not by the safetensors package, for four reasons: the package
writes metadata in random order and we promise equal bytes for equal entries; the checksum behind
the data is known only when the data is written; every size is compared with the file's before
memory is allocated; and the data is read once, into the memory that the entry then lives in.
The tests read our files with the package.

The checksum is verified on every load. It costs 6 ms for 25 MB, where reading them costs 4 ms out
of the page cache and 8 ms or more from a drive; an entry is read once and then served from memory,
and a wrong answer costs more than that.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from pc_rag.errors import CorruptEntry, StoreError
from pc_rag.kv.entry import Entry
from pc_rag.kv.key import FORMAT_VERSION, EntryAddress
from pc_rag.types import StorageDtype

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO

    import numpy.typing as npt

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 16 * 1024  # ours have about 900
_ID_BYTES = 4
_CHECKSUM_BYTES = 4
_BLOCK_BYTES = 1 << 20  # read and checksummed while still in the processor's cache
_NUM_AXES = 4
_TOKEN_AXIS = 2

_TENSOR_NAMES = ("keys", "values", "token_ids", "checksum")
_DTYPE_CODES = {
    StorageDtype.FLOAT32: "F32",
    StorageDtype.BFLOAT16: "BF16",
    StorageDtype.FLOAT16: "F16",
}
_TORCH_DTYPES = {
    StorageDtype.FLOAT32: torch.float32,
    StorageDtype.BFLOAT16: torch.bfloat16,
    StorageDtype.FLOAT16: torch.float16,
}


_MAX_START_DIGITS = 19
"""Of a position ID, which has 64 bits; ``int`` refuses thousands with an error of its own."""


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The header of an entry's file, checked against the size of the file.

    Attributes:
        metadata: The file's ``__metadata__``.
        dtype: Numeric type of keys and values.
        keys_shape: ``[num_layers, num_kv_heads, num_tokens, head_dim]``.
        values_shape: ``[num_layers, num_kv_heads, num_tokens, head_dim]``.
        data_start: Byte at which the keys start.
    """

    metadata: Mapping[str, str]
    dtype: StorageDtype
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    data_start: int

    @property
    def start(self) -> int:
        """Position ID that its first token was encoded at.

        Raises:
            CorruptEntry: The metadata do not say.
        """
        text = self.metadata.get("start", "")
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_START_DIGITS):
            _fail(f"start {text[:_MAX_START_DIGITS]!r} is no position ID")
        return int(text)

    @property
    def num_tokens(self) -> int:
        """Tokens of the entry."""
        return self.keys_shape[_TOKEN_AXIS]

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys."""
        return math.prod(self.keys_shape) * _TORCH_DTYPES[self.dtype].itemsize

    @property
    def values_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.values_shape) * _TORCH_DTYPES[self.dtype].itemsize

    @property
    def ids_start(self) -> int:
        """Byte at which the token ids start."""
        return self.data_start + self.keys_bytes + self.values_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.ids_start + _ID_BYTES * self.num_tokens + _CHECKSUM_BYTES


def entry_file_bytes(entry: Entry) -> int:
    """Bytes of the file that ``write_entry`` makes of an entry."""
    return (
        len(_encode_head(entry)) + entry.num_bytes + _ID_BYTES * entry.num_tokens + _CHECKSUM_BYTES
    )


def write_entry(file: FileIO, entry: Entry) -> None:
    """Write an entry; equal entries give equal bytes.

    Args:
        file: Open for writing, at its start.
        entry: The entry; copied to the CPU where it is not there. Not modified.

    Raises:
        StoreError: A token id does not fit into 32 bits.
        OSError: The medium failed.
    """
    checksum = 0
    for data in (
        memoryview(_encode_head(entry)),
        _bytes_of(entry.keys),
        _bytes_of(entry.values),
        memoryview(_pack_token_ids(entry.address)),
    ):
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            checksum = zlib.crc32(block, checksum)
            _write_all(file, block)
    _write_all(file, memoryview(checksum.to_bytes(_CHECKSUM_BYTES, "little")))


def read_header(file: FileIO) -> EntryHeader:
    """Read the header and compare every size in it with the size of the file.

    Args:
        file: Open for reading.

    Raises:
        CorruptEntry: The header is not one of an entry, or the file has another size.
        OSError: The medium failed.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    file.seek(0)
    head = _read_exactly(file, min(file_bytes, _LENGTH_BYTES + _MAX_HEADER_BYTES))
    json_bytes = int.from_bytes(head[:_LENGTH_BYTES], "little")
    limit = min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES)
    if json_bytes > limit:
        _fail(f"the header is said to have {json_bytes} bytes, at most {limit} are possible")
    header = _parse_header(head[_LENGTH_BYTES : _LENGTH_BYTES + json_bytes])
    if header.file_bytes != file_bytes:
        _fail(f"the file has {file_bytes} bytes, its header describes {header.file_bytes}")
    return header


def check_address(file: FileIO, header: EntryHeader, address: EntryAddress) -> None:
    """Compare what the file says it is, token ids included, with what was asked for.

    Raises:
        CorruptEntry: The file holds another entry.
        OSError: The medium failed.
    """
    expected = _metadata_of(address)
    for name, value in expected.items():
        found = header.metadata.get(name)
        if found != value:
            _fail(f"{name} is {found!r}, expected {value!r}: the file is another entry's")
    if header.dtype is not address.dtype or header.num_tokens != len(address.token_ids):
        _fail(
            f"it holds {header.num_tokens} tokens of {header.dtype.value}, expected "
            f"{len(address.token_ids)} of {address.dtype.value}"
        )
    file.seek(header.ids_start)
    if _read_exactly(file, _ID_BYTES * header.num_tokens) != _pack_token_ids(address):
        _fail("its token ids are not those asked for")


def read_entry(file: FileIO, address: EntryAddress) -> Entry:
    """Read and verify an entry.

    Args:
        file: Open for reading.
        address: What was asked for.

    Returns:
        The entry on the CPU. Its keys and values are views of one buffer that nobody else holds.

    Raises:
        CorruptEntry: The bytes are not what was written for this address.
        OSError: The medium failed.
    """
    header = read_header(file)
    check_address(file, header, address)
    # np.empty asks for huge pages, which makes the first touch of 25 MB three times as fast as in
    # memory from torch.empty.
    buffer: npt.NDArray[np.uint8] = np.empty(header.keys_bytes + header.values_bytes, np.uint8)
    _read_verified(file, header, buffer.data)
    data = torch.from_numpy(buffer)
    dtype = _TORCH_DTYPES[header.dtype]
    keys = _tensor_of(data[: header.keys_bytes], dtype, header.keys_shape)
    values = _tensor_of(data[header.keys_bytes :], dtype, header.values_shape)
    return Entry(address, keys, values)


def verify_file(file: FileIO, key: str) -> None:
    """Verify a file whose address is not known, in constant memory.

    Raises:
        CorruptEntry: The bytes are not what was written for this key.
        OSError: The medium failed.
    """
    header = read_header(file)
    if header.metadata.get("key") != key:
        _fail(f"key is {header.metadata.get('key')!r}, its name says {key!r}")
    _read_verified(file, header, None)


def _fail(problem: str) -> NoReturn:
    raise CorruptEntry(f"damaged entry file: {problem}; encode the module again")


def _metadata_of(address: EntryAddress) -> dict[str, str]:
    """The metadata of an entry. The tenant's salt is left out: the key covers it."""
    return {
        "content_id": address.content_id,
        "context_digest": address.context.digest,
        "dtype": address.dtype.value,
        "fingerprint": address.fingerprint,
        "format_version": str(FORMAT_VERSION),
        "key": address.key,
        "start": str(address.start),
        "visibility": address.context.visibility.value,
    }


def _encode_head(entry: Entry) -> bytes:
    """Length and JSON, padded so that the keys start at a multiple of 64 bytes."""
    code = _DTYPE_CODES[entry.address.dtype]
    num_tokens = entry.num_tokens
    described = _describe(
        [
            ("keys", code, list(entry.keys.shape), entry.keys.nbytes),
            ("values", code, list(entry.values.shape), entry.values.nbytes),
            ("token_ids", "I32", [num_tokens], _ID_BYTES * num_tokens),
            ("checksum", "U8", [_CHECKSUM_BYTES], _CHECKSUM_BYTES),
        ]
    )
    header = {"__metadata__": _metadata_of(entry.address), **described}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    padding = -(_LENGTH_BYTES + len(text)) % _ALIGNMENT
    text += b" " * padding
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _describe(tensors: list[tuple[str, str, list[int], int]]) -> dict[str, dict[str, Any]]:
    """Descriptors of tensors that follow each other without gaps."""
    described: dict[str, dict[str, Any]] = {}
    end = 0
    for name, code, shape, num_bytes in tensors:
        start, end = end, end + num_bytes
        described[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    return described


def _parse_header(text: bytes) -> EntryHeader:
    """Accept what ``_encode_head`` writes and nothing else; sizes are still to be compared."""
    try:
        header = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CorruptEntry(f"damaged entry file: its header is no JSON ({error})") from error
    if not isinstance(header, dict) or set(header) != {"__metadata__", *_TENSOR_NAMES}:
        _fail(f"its header does not describe exactly {', '.join(_TENSOR_NAMES)}")
    metadata = header["__metadata__"]
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail("its metadata is no map of strings")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        _fail(f"format version {metadata.get('format_version')!r}, this release reads 1")
    dtypes = [dtype for dtype in StorageDtype if dtype.value == metadata.get("dtype")]
    if not dtypes:
        _fail(f"dtype {metadata.get('dtype')!r} is unknown")
    keys_shape, values_shape = (_shape_of(header[name]) for name in ("keys", "values"))
    if keys_shape[_TOKEN_AXIS] != values_shape[_TOKEN_AXIS]:
        _fail(f"keys have shape {keys_shape}, values {values_shape}: other numbers of tokens")
    parsed = EntryHeader(
        metadata, dtypes[0], keys_shape, values_shape, data_start=_LENGTH_BYTES + len(text)
    )
    code = _DTYPE_CODES[parsed.dtype]
    expected = _describe(
        [
            ("keys", code, list(keys_shape), parsed.keys_bytes),
            ("values", code, list(values_shape), parsed.values_bytes),
            ("token_ids", "I32", [parsed.num_tokens], _ID_BYTES * parsed.num_tokens),
            ("checksum", "U8", [_CHECKSUM_BYTES], _CHECKSUM_BYTES),
        ]
    )
    if {name: header[name] for name in _TENSOR_NAMES} != expected:
        _fail("its tensors do not follow each other as the format says")
    return parsed


def _shape_of(described: Any) -> tuple[int, ...]:  # noqa: ANN401 - JSON from a file
    shape = described.get("shape") if isinstance(described, dict) else None
    if (
        not isinstance(shape, list)
        or len(shape) != _NUM_AXES
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        _fail(f"shape {shape!r} is not [num_layers, num_kv_heads, num_tokens, head_dim]")
    return tuple(shape)


def _pack_token_ids(address: EntryAddress) -> bytes:
    ids = np.asarray(address.token_ids, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
        raise StoreError(
            f"entry {address.key[:12]}: token ids run from {ids.min()} to {ids.max()}; the file "
            f"format holds 0 to {np.iinfo(np.int32).max}"
        )
    return ids.astype("<i4").tobytes()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order; a view where it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _tensor_of(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of bytes as a tensor; torch makes none of no bytes."""
    return data.view(dtype).view(shape) if data.numel() else torch.empty(shape, dtype=dtype)


def _write_all(file: FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _read_exactly(file: FileIO, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _read_into(file, memoryview(data))
    return bytes(data)


def _read_into(file: FileIO, target: memoryview) -> None:
    while len(target):
        num_read = file.readinto(target)
        if not num_read:
            _fail(f"it ends {len(target)} bytes early")
        target = target[num_read:]


def _read_verified(file: FileIO, header: EntryHeader, target: memoryview | None) -> None:
    """Read the whole file, keys and values into ``target``, and compare the checksum."""
    file.seek(0)
    checksum = zlib.crc32(_read_exactly(file, header.data_start))
    scratch = memoryview(bytearray(_BLOCK_BYTES if target is None else 0))
    num_bytes = header.keys_bytes + header.values_bytes
    for start in range(0, num_bytes, _BLOCK_BYTES):
        end = min(start + _BLOCK_BYTES, num_bytes)
        block = scratch[: end - start] if target is None else target[start:end]
        _read_into(file, block)
        checksum = zlib.crc32(block, checksum)
    checksum = zlib.crc32(_read_exactly(file, _ID_BYTES * header.num_tokens), checksum)
    stored = int.from_bytes(_read_exactly(file, _CHECKSUM_BYTES), "little")
    if stored != checksum:
        _fail(f"its checksum is {stored:08x}, its bytes give {checksum:08x}")
