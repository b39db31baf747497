"""The prefixes of a corpus, under one tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.packing import pack_token_ids, unpack_token_ids
from pc_rag.corpus.catalog.records import PrefixRecord, PrefixRole, prefix_id_of

if TYPE_CHECKING:
    from pc_rag.corpus.catalog.database import Database
    from pc_rag.types import TokenIds


class PrefixTable:
    """Prefixes by id."""

    def __init__(self, database: Database, tokenizer_id: str) -> None:
        self._database = database
        self._tokenizer_id = tokenizer_id

    def record(self, text: str, token_ids: TokenIds, *, role: PrefixRole) -> PrefixRecord:
        """Store a prefix, or give a stored one its role.

        There is one default: a former one becomes adopted, so its entries are still served.
        """
        prefix_id = prefix_id_of(token_ids, self._tokenizer_id)
        with self._database.write() as connection:
            if role is PrefixRole.DEFAULT:
                connection.execute(
                    "UPDATE prefixes SET role = ? WHERE tokenizer_id = ? AND role = ?",
                    (PrefixRole.ADOPTED, self._tokenizer_id, PrefixRole.DEFAULT),
                )
            connection.execute(
                "INSERT INTO prefixes VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET role = excluded.role",
                (prefix_id, self._tokenizer_id, text, pack_token_ids(token_ids), role),
            )
        return PrefixRecord(id=prefix_id, text=text, token_ids=token_ids, role=role)

    def all(self) -> tuple[PrefixRecord, ...]:
        """The default first, then the adopted ones in the order they came."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id, text, token_ids, role FROM prefixes WHERE tokenizer_id = ? "
                "ORDER BY role = 'default' DESC, rowid",
                (self._tokenizer_id,),
            ).fetchall()
        return tuple(
            PrefixRecord(
                id=prefix_id,
                text=text,
                token_ids=unpack_token_ids(token_ids),
                role=PrefixRole(role),
            )
            for prefix_id, text, token_ids, role in rows
        )

    def remove(self, prefix_id: str) -> bool:
        """Delete a prefix with its entries' records. Whether it was there.

        Remove its entries (``EntryTable.of_prefix``, ``ScaffoldTable.keys_behind``) from the KV
        store first: afterwards nothing knows them.
        """
        with self._database.write() as connection:
            connection.execute("DELETE FROM entries WHERE prefix_id = ?", (prefix_id,))
            connection.execute("DELETE FROM scaffold_entries WHERE prefix_id = ?", (prefix_id,))
            return bool(
                connection.execute("DELETE FROM prefixes WHERE id = ?", (prefix_id,)).rowcount
            )
