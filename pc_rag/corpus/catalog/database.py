"""One SQLite file: opening it safely, its version, and transactions over it."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from pc_rag.errors import StoreError, StoreIOError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BUSY_SECONDS = 30.0
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


class Database:
    """A catalog's SQLite file.

    One connection behind a lock serves every thread of the process: transactions are short, and
    SQLite would let one writer through at a time anyway. Other processes may read while one writes
    (write-ahead log), and a second writer waits up to 30 s. ``synchronous=FULL`` syncs the log at
    every commit, so what was acknowledged survives both a killed process and a power cut.

    Args:
        path: The file; created with mode 0600 in a folder of mode 0700.

    Raises:
        StoreError: The file is a link, is no catalog, or was written by a newer pc-rag.
        StoreIOError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        _create_private(path)
        with self._wrapped_errors():
            connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection = connection
            try:
                self._prepare(connection)
            except BaseException:
                self.close()
                raise

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        self._check_kind(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        with self.write() as writer:
            # Asked again under the write lock: another process may have been first.
            version = _pragma(writer, "user_version")
            for number in range(version, SCHEMA_VERSION):
                for statement in MIGRATIONS[number].split(";"):
                    writer.execute(statement)
            if version < SCHEMA_VERSION:
                writer.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_kind(self, connection: sqlite3.Connection) -> None:
        version = _pragma(connection, "user_version")
        num_objects = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if _pragma(connection, "application_id") != APPLICATION_ID and (version or num_objects):
            raise StoreError(
                f"{self.path}: an SQLite file of another program; choose another folder"
            )
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path}: catalog version {version}, and this pc-rag reads up to "
                f"{SCHEMA_VERSION}; upgrade pc-rag, or index into another folder"
            )

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A consistent view over several statements.

        Raises:
            StoreError: The catalog is closed, or the file is damaged.
            StoreIOError: The medium failed, or another process held the file too long.
        """
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is committed and synced when the block ends, or leaves no trace.

        Raises:
            StoreError: The catalog is closed, or the file is damaged.
            StoreIOError: The medium failed, or another process held the file too long.
        """
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, self._wrapped_errors():
            connection = self._connection
            if connection is None:
                raise StoreError(f"{self.path}: the catalog is closed; open it again")
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _wrapped_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreIOError(
                f"{self.path}: {error}; check the disk, its free space and other processes that "
                f"use this store"
            ) from error
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self.path}: {error}; restore the file, or index into another folder"
            ) from error


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _create_private(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its log and index files the mode of the file itself.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600))
    except OSError as error:
        if path.is_symlink():
            raise StoreError(
                f"{path}: a link; a catalog is never followed out of its folder"
            ) from error
        raise StoreIOError(f"{path}: {error.strerror}; check the folder's permissions") from error
