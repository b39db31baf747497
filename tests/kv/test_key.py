from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pc_rag.errors import StoreError
from pc_rag.kv import Entry, VisibilityContext
from pc_rag.kv.entry_name import EntryName
from pc_rag.types import Fingerprint, Span, StorageDtype, Visibility
from tests.support.kv import make_address, make_entry

REPOSITORY = Path(__file__).parents[2]
CHANGES: dict[str, object] = {
    "fingerprint": Fingerprint("0" * 64),
    "token_ids": (5, 6, 8),
    "context": VisibilityContext.of(Visibility.PREFIX, (1,), (0,)),
    "start": 11,
    "dtype": StorageDtype.FLOAT16,
    "tenant": "a",
}


def test_key_is_the_published_one_when_computed_today() -> None:
    """The encoding behind a key is fixed: stores outlive releases."""
    address = make_address()
    assert address.key == "3f52f56715894117890b944f634e5dba2db1c6a19a3b8455b8903ef186181f7f"
    assert address.content_id == "f0eb26cccd93b671"
    assert EntryName.of(address).model_id == "0a15c3950ab3"


@pytest.mark.parametrize("name", list(CHANGES))
def test_key_differs_when_one_field_differs(name: str) -> None:
    """Everything that decides the KV is inside the key."""
    assert make_address(**{name: CHANGES[name]}).key != make_address().key


def test_key_stays_when_the_hash_seed_differs() -> None:
    """Pitfall 43: a new process with another PYTHONHASHSEED makes the same keys."""
    code = (
        "import json\nfrom tests.support.kv import make_address\n"
        "print(json.dumps([make_address().key, make_address().content_id]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == [make_address().key, make_address().content_id]


def test_content_id_is_shared_when_only_model_prefix_or_start_differ() -> None:
    """Entries of one text share a content id; another tenant's do not."""
    plain = make_address().content_id
    for name in ("fingerprint", "context", "start", "dtype"):
        assert make_address(**{name: CHANGES[name]}).content_id == plain
    assert make_address(tenant="a").content_id != plain
    assert make_address((1, 2)).content_id != plain


def test_context_is_the_modules_own_when_nothing_was_attended() -> None:
    """An empty prefix is no prefix."""
    assert VisibilityContext.of(Visibility.PREFIX, (), ()) == VisibilityContext.module()


def test_span_runs_from_the_start_when_asked() -> None:
    """The span of an address is where it was encoded."""
    assert make_address().span == Span(10, 13)


def test_file_name_is_parsed_back_when_it_is_an_entrys() -> None:
    """A name survives its file name; anything else is none."""
    name = EntryName.of(make_address())
    assert EntryName.parse(name.file_name) == name
    for other in ("", "x" + name.file_name, name.file_name + ".tmp", name.file_name.upper()):
        assert EntryName.parse(other) is None


def test_entry_is_refused_when_its_tensors_do_not_fit_the_address() -> None:
    """Another number of tokens, of axes, or another dtype is an error with both sides named."""
    entry = make_entry()
    with pytest.raises(StoreError, match=r"expected .*3"):
        Entry(entry.address, entry.keys[:, :, :2], entry.values)
    with pytest.raises(StoreError, match="values have shape"):
        Entry(entry.address, entry.keys, entry.values[0])
    with pytest.raises(StoreError, match=r"bfloat16.*float32"):
        Entry(entry.address, entry.keys, entry.values.to(torch.bfloat16))
