"""Opening a corpus the way its store was indexed, unless options say otherwise."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging

from pc_rag.cli.output import err, say
from pc_rag.cli.store_folder import Manifest
from pc_rag.config import ENVIRONMENT_PREFIX, EngineConfig
from pc_rag.corpus import Corpus, default_embedder, sentence_transformer
from pc_rag.engine import PromptCache
from pc_rag.errors import ModelError
from pc_rag.model.builtin import DEFAULT_MODEL
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.loading import load_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pc_rag.cli.store_folder import StoreFolder
    from pc_rag.corpus import Embedder

_REMEMBERED = ("position_policy", "visibility", "storage_dtype", "slot_tokens", "chunk_tokens")
"""Settings that decide which entries fit. The tenant is not among them: a salt stays secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the options of a command say; what they leave open is the store's.

    Attributes:
        model: Name of a model.
        dtype: Compute dtype.
        device: Where the model runs.
        embedder: Name of an embedder.
        config_file: Settings of the engine.
        settings: Settings given as options; those not given are absent.
    """

    model: str | None = None
    dtype: str | None = None
    device: str = "auto"
    embedder: str | None = None
    config_file: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenedCorpus:
    """A corpus that is ready, and how it would be remembered.

    Attributes:
        corpus: The corpus.
        manifest: Of this opening.
        former: Of the last index; ``None`` for a new store.
    """

    corpus: Corpus
    manifest: Manifest
    former: Manifest | None

    @property
    def is_other_model(self) -> bool:
        """Whether the store's entries are another model's, so that none can hit."""
        return self.former is not None and self.former.fingerprint != self.manifest.fingerprint


@contextmanager
def open_corpus(folder: StoreFolder, choice: Choice) -> Iterator[OpenedCorpus]:
    """Load model and embedder and open the corpus in a folder; closed at the end of the block.

    Raises:
        ConfigError: A setting is malformed.
        ModelError: The model or the embedder cannot be loaded.
        StoreError: The store cannot be opened.
    """
    former = folder.manifest()
    config = _load_config(choice, former)
    model = _absolute(choice.model) or (former.model if former else DEFAULT_MODEL)
    dtype = choice.dtype or (former.dtype if former else "auto")
    embedder_name = _absolute(choice.embedder) or (former.embedder if former else None)
    transformers_logging.disable_progress_bar()  # ours is shown instead
    with err.status(f"loading {model}"):
        loaded = load_model(model, dtype=dtype, device=choice.device)
        embedder = _open_embedder(embedder_name)
    with (
        PromptCache.from_pretrained(loaded, store=folder.kv, config=config) as engine,
        Corpus(engine, folder.root, embedding=embedder) as corpus,
    ):
        manifest = Manifest(
            model=model,
            dtype=str(loaded.dtype).removeprefix("torch."),
            fingerprint=loaded.fingerprint,
            tokenizer_id=loaded.tokenizer.digest,
            embedder=embedder_name,
            settings={name: _setting_text(getattr(config, name)) for name in _REMEMBERED},
        )
        yield OpenedCorpus(corpus, manifest, former)


def warm_up(corpus: Corpus, *, generates: bool) -> None:
    """Make the first question as fast as later ones, leaving nothing behind in any cache.

    Args:
        corpus: The corpus.
        generates: Run the model too, not only the embedder: for measurements.
    """
    with err.status("warming up"):
        corpus.search("warm-up", 1)
        if generates:
            corpus.engine.generate(
                [ChatMessage(Role.USER, "Say hello. " * 32)],
                GenerationConfig(max_new_tokens=4),
                reuse=False,
            )


def say_if_other_model(opened: OpenedCorpus) -> None:
    """Say on stderr that nothing will hit, and why."""
    if opened.former is not None and opened.is_other_model:
        say(
            f"note: the store was indexed with {opened.former.model} ({opened.former.dtype}), and "
            f"entries fit one model only: nothing will hit for {opened.manifest.model} "
            f"({opened.manifest.dtype}), chunks are encoded when they are asked for",
            style="yellow",
        )


def _load_config(choice: Choice, former: Manifest | None) -> EngineConfig:
    # What the store remembers ranks below every other source but the defaults.
    remembered = {
        f"{ENVIRONMENT_PREFIX}{name.upper()}": value
        for name, value in (former.settings if former else {}).items()
    }
    return EngineConfig.load(
        file=choice.config_file, environ={**remembered, **os.environ}, **choice.settings
    )


def _setting_text(value: object) -> str:
    return "none" if value is None else str(value)


def _absolute(name: str | None) -> str | None:
    """A path that is there made absolute, so that it is found from elsewhere; a name as it is."""
    if name is None:
        return None
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _open_embedder(name: str | None) -> Embedder:
    if name is None:
        return default_embedder()
    embedder = sentence_transformer(name)
    try:
        embedder(["probe"])
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot load the embedder {name!r}: {_first_line(error)}. Give the "
            f"folder of a sentence-transformers model, or a hub name that was loaded while online"
        ) from error
    return embedder


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
