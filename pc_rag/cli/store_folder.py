"""A store on disk: its catalog, its entries, and what it remembers about how it was indexed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog import Catalog
from pc_rag.corpus.catalog.catalog import FILE_NAME
from pc_rag.errors import StoreError
from pc_rag.kv import DiskTier

if TYPE_CHECKING:
    from collections.abc import Mapping

_MANIFEST_SETTING = "cli.manifest"
_KV = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """How a store was indexed last, so that questions need no options to hit.

    Attributes:
        model: What the model was called.
        dtype: The compute dtype.
        fingerprint: Of the model.
        tokenizer_id: Names the tokenizer of the catalog's token counts.
        embedder: Name of the embedder; ``None`` for the packaged one.
        settings: Settings of the engine that decide which entries fit, as a file would hold them.
    """

    model: str
    dtype: str
    fingerprint: str
    tokenizer_id: str
    embedder: str | None
    settings: Mapping[str, str]


class StoreFolder:
    """The folder that ``--store`` names: ``catalog.sqlite``, and entries below ``kv``.

    Args:
        root: The folder; made by the first index.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser()
        self.kv = self.root / _KV

    @property
    def exists(self) -> bool:
        """Whether something was indexed into it."""
        return (self.root / FILE_NAME).is_file()

    def require(self) -> None:
        """Check that there is a store.

        Raises:
            StoreError: There is none.
        """
        if not self.exists:
            raise StoreError(
                f"{self.root}: no store here (it has no {FILE_NAME}); make one with "
                f"`pc-rag index PATH --store {self.root}`"
            )

    def open_catalog(self) -> Catalog:
        """The catalog, counting tokens by the tokenizer of the last index."""
        manifest = self.manifest()
        return Catalog(self.root, tokenizer_id=manifest.tokenizer_id if manifest else "")

    def open_disk_tier(self) -> DiskTier:
        """The entries on disk, without a limit, so that opening evicts nothing."""
        return DiskTier(self.kv)

    def manifest(self) -> Manifest | None:
        """What was remembered; ``None`` where nothing was indexed by the command line.

        Raises:
            StoreError: What was remembered cannot be read.
        """
        if not self.exists:
            return None
        with Catalog(self.root, tokenizer_id="") as catalog:
            text = catalog.setting(_MANIFEST_SETTING)
        if text is None:
            return None
        try:
            return Manifest(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"{self.root}: its record of how it was indexed is of another pc-rag ({error}); "
                f"index into another folder"
            ) from error

    def remember(self, manifest: Manifest) -> None:
        """Keep how the store is indexed from now on."""
        with Catalog(self.root, tokenizer_id=manifest.tokenizer_id) as catalog:
            catalog.put_setting(_MANIFEST_SETTING, json.dumps(dataclasses.asdict(manifest)))

    def free_bytes(self) -> int:
        """Bytes free where the store lies, or will lie.

        Raises:
            StoreError: No folder above it can be read.
        """
        place = self.root.resolve()
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            return shutil.disk_usage(place).free
        except OSError as error:
            raise StoreError(f"{place}: cannot be read ({error.strerror})") from error

    def delete(self) -> None:
        """Delete catalog and entries, and nothing else that may lie in the folder."""
        for path in self.root.glob(f"{FILE_NAME}*"):
            path.unlink()
        if self.kv.is_dir():
            shutil.rmtree(self.kv)
