"""The digest of a model's weights, remembered while its files stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers.utils import cached_file

from pc_rag.model.cache_folder import cache_folder, file_signature, recall, remember
from pc_rag.model.fingerprint import digest_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DIGEST_FILE = "pc-rag-weights.json"
"""How the names of our own files beside a converted model end."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json", ".py")


def folder_of(source: str, *, revision: str) -> Path | None:
    """The folder that a model was loaded from; ``None`` where it cannot be told."""
    if Path(source).is_dir():
        return Path(source)
    options: dict[str, Any] = {"revision": revision, "local_files_only": True}
    config = cached_file(
        source, "config.json", _raise_exceptions_for_missing_entries=False, **options
    )
    return Path(config).parent if config else None


def remembered_digest(model: PreTrainedModel, folder: Path) -> str:
    """``digest_weights``, remembered while the files of the model's folder stay as they are.

    Kept beside a converted model, and in the user's cache for folders that are not ours.
    """
    files = [path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES]
    files = [path for path in files if not path.name.endswith(_DIGEST_FILE) and path.is_file()]
    if any(path.name == "adapter_config.json" for path in files):
        return digest_weights(model)  # the weights below the adapter lie elsewhere
    salt = f"{transformers.__version__} {type(model).__name__} {model.dtype}"
    signature = file_signature(files, salt=salt)
    if folder.is_relative_to(cache_folder()):
        memo = folder / f"{model.dtype}-{_DIGEST_FILE}".removeprefix("torch.")
    else:
        memo = cache_folder() / "digests" / f"{signature}.json"
    digest = recall(memo, signature)
    if digest is None:
        digest = digest_weights(model)
        remember(memo, signature, digest)
    return digest
