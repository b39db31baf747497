"""The catalog's file: private, versioned, durable, shared by processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pc_rag.corpus.catalog import Catalog, DocumentChange
from pc_rag.corpus.catalog.catalog import FILE_NAME
from pc_rag.corpus.documents import Document
from pc_rag.errors import StoreError, StoreIOError
from tests.support.catalog import chunks_of

ROOT = Path(__file__).parents[3]

WRITER = """
import sys
from pc_rag.corpus.catalog import Catalog
from pc_rag.corpus.documents import Document
from tests.support.catalog import chunks_of

with Catalog(sys.argv[1], tokenizer_id="bytes") as catalog:
    for n in range(int(sys.argv[3])):
        document = Document(f"shared\\n{sys.argv[2]} {n}", id=f"{sys.argv[2]}-{n}")
        catalog.add_document(document, chunks_of(document), chunking="lines")
        print(n, flush=True)
"""


def open_catalog(folder):
    return Catalog(folder, tokenizer_id="bytes")


def start_writer(folder, name, num_documents):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), name, str(num_documents)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_files_are_private_when_a_catalog_is_made(tmp_path):
    """0700 for the folder, 0600 for the file, its log and its index, whatever the umask."""
    before = os.umask(0)
    try:
        with open_catalog(tmp_path / "store") as catalog:
            catalog.put_setting("name", "value")
            modes = {
                path.name: stat.S_IMODE(path.stat().st_mode)
                for path in (tmp_path / "store").iterdir()
            }
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


def test_acknowledged_documents_are_there_when_the_writer_is_killed(tmp_path):
    """E8: kill -9 at any moment loses nothing that was acknowledged and breaks nothing."""
    writer = start_writer(tmp_path, "w", 100_000)
    acknowledged = [writer.stdout.readline().strip() for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += writer.stdout.read().split()
    writer.wait()
    writer.stdout.close()
    with open_catalog(tmp_path) as catalog:
        kept = {record.id for record in catalog.documents()}
        assert {f"w-{n}" for n in acknowledged} <= kept
        assert len(kept) <= len(acknowledged) + 1
        assert all(len(catalog.chunks_of(id_)) == 2 for id_ in kept)
        document = Document("after", id="after")
        added = catalog.add_document(document, chunks_of(document), chunking="lines")
        assert added is DocumentChange.ADDED


def test_writers_wait_for_each_other_when_processes_share_a_catalog(tmp_path):
    """Several processes make and fill one catalog at once while this one reads."""
    writers = [start_writer(tmp_path, name, 20) for name in ("a", "b", "c")]
    with open_catalog(tmp_path) as catalog:
        while any(writer.poll() is None for writer in writers):
            stats = catalog.stats()
            assert stats.num_chunks in (0, stats.num_documents + 1)
        for writer in writers:
            writer.communicate()
            assert writer.returncode == 0
        assert catalog.stats().num_documents == 60


def test_documents_are_there_when_a_catalog_is_opened_again(tmp_path):
    """Closing and opening changes nothing."""
    with open_catalog(tmp_path) as catalog:
        document = Document("one\ntwo", id="d", metadata={"k": "v"})
        catalog.add_document(document, chunks_of(document), chunking="lines")
        before = (catalog.document("d"), catalog.chunks_of("d"), catalog.stats())
    with open_catalog(tmp_path) as catalog:
        assert (catalog.document("d"), catalog.chunks_of("d"), catalog.stats()) == before
        assert catalog.compare(document, chunking="lines") is DocumentChange.UNCHANGED


def test_use_is_refused_when_the_catalog_is_closed(tmp_path):
    """Closing twice is harmless; using it afterwards is named."""
    catalog = open_catalog(tmp_path)
    catalog.close()
    catalog.close()
    with pytest.raises(StoreError, match="the catalog is closed"):
        catalog.stats()


def test_file_is_refused_when_a_newer_version_wrote_it(tmp_path):
    """The file stays as it is, and the message says what to do."""
    open_catalog(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=r"catalog version 99.*upgrade pc-rag"):
        open_catalog(tmp_path)


def test_file_is_refused_when_another_program_wrote_it(tmp_path):
    """Its tables are left alone."""
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(StoreError, match="of another program"):
        open_catalog(tmp_path)


def test_file_is_refused_when_it_is_no_database(tmp_path):
    """A damaged file is an error with its path, not an empty catalog."""
    (tmp_path / FILE_NAME).write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match=FILE_NAME):
        open_catalog(tmp_path)


def test_file_is_refused_when_it_is_a_link(tmp_path):
    """A link could lead the catalog out of its folder."""
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="a link"):
        open_catalog(tmp_path)


def test_folder_is_named_when_it_cannot_be_made(tmp_path):
    """A file where the folder should be."""
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(StoreIOError, match="store"):
        open_catalog(tmp_path / "store")
