"""The slot length of a corpus, which its catalog keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    from pc_rag.corpus.catalog import Catalog

_SLOT_SETTING = "slot_tokens"


def check_slots(catalog: Catalog, slot_tokens: int | None) -> None:
    """The slot length belongs to the corpus: chunks longer than another would not fit.

    Raises:
        ConfigError: The catalog was made with another one.
    """
    wanted = str(slot_tokens)
    stored = catalog.setting(_SLOT_SETTING)
    if stored is None:
        catalog.put_setting(_SLOT_SETTING, wanted)
    elif stored != wanted:
        raise ConfigError(
            f"the corpus was created with slot_tokens={stored}; this engine is configured "
            f"with slot_tokens={wanted}. Use slot_tokens={stored}, or another folder"
        )
