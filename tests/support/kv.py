"""Small entries for tests of the store."""

from __future__ import annotations

from typing import Any

import torch

from pc_rag.kv.entry import Entry
from pc_rag.kv.key import EntryAddress, VisibilityContext
from pc_rag.types import Fingerprint, StorageDtype

FINGERPRINT = Fingerprint("f" * 64)
CPU = torch.device("cpu")


def make_address(token_ids: tuple[int, ...] = (5, 6, 7), **changes: Any) -> EntryAddress:
    """An address with plain defaults."""
    fields: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "token_ids": token_ids,
        "context": VisibilityContext.module(),
        "start": 10,
        "dtype": StorageDtype.FLOAT32,
    }
    return EntryAddress(**{**fields, **changes})


def make_entry(
    token_ids: tuple[int, ...] = (5, 6, 7),
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 4,
    **changes: Any,
) -> Entry:
    """An entry of random tensors that its address decides, so that equal entries are equal."""
    address = make_address(token_ids, **changes)
    generator = torch.Generator().manual_seed(int(address.key[:15], 16))
    shape = (num_layers, num_kv_heads, len(token_ids), head_dim)
    dtype = getattr(torch, address.dtype.value)
    keys = torch.randn(shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).to(dtype)
    return Entry(address, keys, values)


def numbered_entry(number: int, *, num_tokens: int = 3, **changes: Any) -> Entry:
    """The ``number``-th of a family of entries that are as large as each other."""
    return make_entry((number, *range(1, num_tokens)), **changes)


def assert_same_entry(found: Entry, expected: Entry) -> None:
    """The same address and the same bits."""
    assert found.address == expected.address
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)
