"""Names for the state of a corpus, by which others see that what they remember still holds."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pc_rag.corpus.prefixes import chunk_recipe
from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache

_SLOT_SETTING = "slot_tokens"
_ANY_TOKENS = (0,)


def corpus_revision(engine: PromptCache, catalog: Catalog, prefixes: Sequence[CorpusPrefix]) -> str:
    """See ``Corpus.revision``.

    Args:
        engine: Whose store and model.
        catalog: Counts the changes of documents.
        prefixes: What chunks are encoded behind.
    """
    # The keys of some chunk stand for all that decides keys: model, dtype, tenant, prefix.
    keys = (chunk_recipe(engine, _ANY_TOKENS, prefix).address.key for prefix in prefixes)
    parts = (catalog.id(), str(catalog.generation()), engine.store.generation, *keys)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


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
