"""``pc-rag remove``: take documents out of a store. No model is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from pc_rag.cli import options
from pc_rag.cli.output import out, print_json
from pc_rag.errors import IngestError


def remove(
    document_ids: Annotated[
        list[str],
        typer.Argument(
            metavar="DOCUMENT_ID", help="Ids; of a file its absolute path (#page=N for a PDF)."
        ),
    ],
    store: options.Store,
    as_json: options.AsJson = False,
) -> None:
    """Remove documents: their chunks are no longer found. `pc-rag gc` reclaims the bytes.

    Nothing is removed where one of the ids is unknown.
    """
    from pc_rag.cli.store_folder import StoreFolder

    folder = StoreFolder(store)
    folder.require()
    with folder.open_catalog() as catalog:
        unknown = [name for name in document_ids if catalog.document(name) is None]
        if unknown:
            raise IngestError(
                f"no document {', '.join(map(repr, unknown))} in {folder.root}; nothing was "
                f"removed. `pc-rag ask --show-chunks` shows sources; a file's id is its absolute "
                f"path"
            )
        for name in document_ids:
            catalog.remove_document(name)
    if as_json:
        print_json({"removed": document_ids})
        return
    for name in document_ids:
        out.print(f"removed {name}", soft_wrap=True)
