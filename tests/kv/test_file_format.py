from __future__ import annotations

import io
import json
import math
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.errors import CorruptEntry, StoreError
from pc_rag.kv import Entry, VisibilityContext
from pc_rag.kv.file_format import (
    EntryHeader,
    entry_file_bytes,
    read_entry,
    read_header,
    verify_file,
    write_entry,
)
from pc_rag.types import StorageDtype, Visibility
from tests.support.kv import assert_same_entry, make_address, make_entry

GOLDEN = Path(__file__).parents[1] / "data" / "entry-v1.safetensors"


def golden_entry() -> Entry:
    """The entry in the golden file."""
    address = make_address(
        (7, 300, 2**31 - 1),
        context=VisibilityContext.of(Visibility.PREFIX, (1, 2), (0, 1)),
        start=2,
        dtype=StorageDtype.BFLOAT16,
        tenant="golden tenant",
    )
    numbers = torch.arange(2 * 1 * 3 * 4, dtype=torch.float32).reshape(2, 1, 3, 4)
    return Entry(address, numbers.to(torch.bfloat16), (-numbers).to(torch.bfloat16))


def written(path: Path, entry: Entry) -> bytes:
    with io.FileIO(path, "w") as file:
        write_entry(file, entry)
    return path.read_bytes()


def read(path: Path, entry: Entry) -> Entry:
    with io.FileIO(path) as file:
        return read_entry(file, entry.address)


def test_golden_file_is_read_and_written_alike_when_the_code_is_todays(tmp_path: Path) -> None:
    """A file of an earlier release is read, and today's bytes are the same."""
    assert_same_entry(read(GOLDEN, golden_entry()), golden_entry())
    assert written(tmp_path / "new", golden_entry()) == GOLDEN.read_bytes()


@settings(max_examples=30, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple),
    dtype=st.sampled_from(StorageDtype),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    start=st.integers(0, 10**6),
)
def test_entry_comes_back_when_written_and_read(
    *,
    tmp_path_factory: pytest.TempPathFactory,
    token_ids: tuple[int, ...],
    dtype: StorageDtype,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    start: int,
) -> None:
    """Any entry survives, its size is known beforehand, and the safetensors package reads it."""
    entry = make_entry(
        token_ids,
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        start=start,
    )
    path = tmp_path_factory.mktemp("entry") / "file"
    assert len(written(path, entry)) == entry_file_bytes(entry)
    assert_same_entry(read(path, entry), entry)
    loaded = safetensors.torch.load(path.read_bytes())
    assert torch.equal(loaded["keys"], entry.keys)
    assert torch.equal(loaded["values"], entry.values)
    assert loaded["token_ids"].tolist() == list(token_ids)
    with io.FileIO(path) as file:
        assert read_header(file).data_start % 64 == 0
        assert read_header(file).start == start
        verify_file(file, entry.address.key)


def test_values_may_have_another_width_when_the_model_has(tmp_path: Path) -> None:
    """Keys and values need to share the number of tokens only."""
    entry = make_entry()
    wide = Entry(entry.address, entry.keys, torch.randn(2, 2, 3, 6))
    written(tmp_path / "file", wide)
    assert_same_entry(read(tmp_path / "file", wide), wide)


def test_entry_is_written_right_when_its_tensors_are_not_contiguous(tmp_path: Path) -> None:
    """Slices and transposed views are stored in the documented order."""
    entry = make_entry()
    odd = Entry(
        entry.address,
        entry.keys.transpose(0, 3).contiguous().transpose(0, 3),
        torch.randn(2, 2, 9, 4)[:, :, ::3],
    )
    written(tmp_path / "file", odd)
    assert_same_entry(read(tmp_path / "file", odd), odd)


def test_read_tensors_share_one_buffer_when_loaded(tmp_path: Path) -> None:
    """Loading makes no second copy: both tensors are views of the one buffer read into."""
    entry = make_entry()
    written(tmp_path / "file", entry)
    found = read(tmp_path / "file", entry)
    assert found.keys.untyped_storage().data_ptr() == found.values.untyped_storage().data_ptr()
    assert found.keys.untyped_storage().nbytes() == entry.num_bytes


def test_file_is_within_one_percent_of_theory_when_160_tokens_are_stored() -> None:
    """Store bytes per token against 2 * layers * kv_heads * head_dim * bytes."""
    for dtype in (StorageDtype.FLOAT32, StorageDtype.BFLOAT16):
        entry = make_entry(
            tuple(range(160)), num_layers=30, num_kv_heads=3, head_dim=64, dtype=dtype
        )
        theory = 2 * 30 * 3 * 64 * entry.keys.element_size() * 160
        assert theory < entry_file_bytes(entry) < 1.001 * theory


def test_tenant_cannot_be_read_when_a_file_is_looked_at() -> None:
    """The salt that keeps tenants apart stands nowhere in the file."""
    assert b"tenant" not in GOLDEN.read_bytes()


def test_token_ids_are_refused_when_they_exceed_the_format(tmp_path: Path) -> None:
    """Ids outside 31 bits are an error before anything is visible."""
    for ids in ((2**31,), (-1,)):
        with pytest.raises(StoreError, match="token ids run from"):
            written(tmp_path / "file", make_entry(ids))


def test_any_flipped_byte_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    """E10: every single byte of the file is covered, header and padding included."""
    data = GOLDEN.read_bytes()
    path = tmp_path / "file"
    for index in range(len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ 0x20]) + data[index + 1 :])
        with pytest.raises(CorruptEntry):
            read(path, golden_entry())
        with io.FileIO(path) as file, pytest.raises(CorruptEntry):
            verify_file(file, golden_entry().address.key)


def test_any_truncation_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    """E10: a file cut off anywhere, or with bytes behind its end, is refused."""
    data = GOLDEN.read_bytes()
    path = tmp_path / "file"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptEntry):
            read(path, golden_entry())
    path.write_bytes(data + b"\0")
    with pytest.raises(CorruptEntry):
        read(path, golden_entry())


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_when_read(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    """E10: no input makes anything but ``CorruptEntry``."""
    path = tmp_path_factory.mktemp("entry") / "file"
    path.write_bytes(data)
    with pytest.raises(CorruptEntry):
        read(path, golden_entry())


def with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 64


def golden_header() -> dict[str, dict[str, object]]:
    data = GOLDEN.read_bytes()
    length = int.from_bytes(data[:8], "little")
    parsed: dict[str, dict[str, object]] = json.loads(data[8 : 8 + length])
    return parsed


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2**63 - 1).to_bytes(8, "little") + b"{}",
        (10**6).to_bytes(8, "little") + b" " * 10**6,
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (8000).to_bytes(8, "little") + b"[" * 8000,
        with_header([]),
        with_header({**golden_header(), "extra": {}}),
        with_header({**golden_header(), "__metadata__": {"format_version": 1}}),
        with_header({**golden_header(), "keys": None}),
        with_header({**golden_header(), "keys": {"shape": [2, 1, 3]}}),
        with_header({**golden_header(), "keys": {"shape": [2, 1, 3, -4]}}),
        with_header({**golden_header(), "keys": {"shape": [2, 1, 3, True]}}),
        with_header({**golden_header(), "keys": {"shape": [2, 1, 3, 4.0]}}),
        with_header({**golden_header(), "checksum": {}}),
        pickle.dumps(golden_header()),
    ],
    ids=range(16),
)
def test_malformed_headers_are_refused_when_read(tmp_path: Path, data: bytes) -> None:
    """E10: lengths, nesting, missing and extra tensors, shapes of other kinds."""
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CorruptEntry):
        read(tmp_path / "file", golden_entry())


@pytest.mark.parametrize(
    "start",
    [{}, {"start": ""}, {"start": "-1"}, {"start": "two"}, {"start": "9" * 5000}],
    ids=["none", "empty", "negative", "word", "endless"],
)
def test_start_is_refused_when_it_is_no_position_id(start: dict[str, str]) -> None:
    """E10: the metadata of a damaged file may say anything."""
    header = EntryHeader(start, StorageDtype.FLOAT32, (1, 1, 1, 1), (1, 1, 1, 1), data_start=0)
    with pytest.raises(CorruptEntry, match="no position ID"):
        header.start  # noqa: B018 - reading it is the test


def test_nothing_is_allocated_when_a_header_promises_terabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E10: sizes are compared with the file's before memory is asked for."""
    header = golden_header()
    shape = [2**20, 2**10, 3, 2**10]
    num_bytes = 2 * math.prod(shape)
    header["keys"] = {"dtype": "BF16", "shape": shape, "data_offsets": [0, num_bytes]}
    header["values"] = {
        "dtype": "BF16",
        "shape": shape,
        "data_offsets": [num_bytes, 2 * num_bytes],
    }
    for name, size in (("token_ids", 12), ("checksum", 4)):
        start = 2 * num_bytes + (12 if name == "checksum" else 0)
        header[name] = {**header[name], "data_offsets": [start, start + size]}
    (tmp_path / "file").write_bytes(with_header(header))
    with pytest.raises(CorruptEntry, match="its header describes"):
        read(tmp_path / "file", golden_entry())


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 3},
        {"tenant": "another"},
        {"dtype": StorageDtype.FLOAT16},
        {"context": VisibilityContext.module()},
        {"token_ids": (7, 300, 5)},
    ],
    ids=str,
)
def test_file_is_refused_when_it_is_another_entrys(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """E10: a file renamed to another key is found, whatever part of the address differs."""
    address = golden_entry().address
    fields = {
        name: getattr(address, name)
        for name in ("token_ids", "context", "start", "dtype", "tenant")
    }
    other = make_address(**{**fields, **changes})
    with io.FileIO(GOLDEN) as file, pytest.raises(CorruptEntry, match="another entry's"):
        read_entry(file, other)


def test_token_ids_are_compared_when_all_else_agrees(tmp_path: Path) -> None:
    """A key that lies about its tokens is found by the ids in the file."""
    forged = make_address((7, 300, 5))
    golden = golden_entry().address
    for name in ("key", "content_id", "context", "start", "dtype"):
        object.__setattr__(forged, name, getattr(golden, name))
    with io.FileIO(GOLDEN) as file, pytest.raises(CorruptEntry, match="token ids"):
        read_entry(file, forged)
