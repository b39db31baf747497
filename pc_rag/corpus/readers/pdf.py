"""Text of a PDF, page by page."""

from __future__ import annotations

import io
from typing import Any

from pc_rag.errors import IngestError, require


def pdf_pages(data: bytes, source: str) -> list[str]:
    """The text of every page, in order; a page without text (a scan) is an empty string.

    Args:
        data: The file's bytes.
        source: Its name, for messages.

    Raises:
        IngestError: The file is damaged or needs a password.
        MissingDependencyError: pypdf is not installed.
    """
    pypdf = require("pypdf", feature="reading PDF", extra="documents")
    try:
        return _extract(pypdf, data, source)
    except IngestError:
        raise
    except Exception as error:
        # Damaged files make pypdf raise KeyError, TypeError, RecursionError and more besides its
        # own errors; whatever it raises about these bytes means that they cannot be read.
        raise IngestError(
            f"{source}: damaged PDF ({type(error).__name__}: {error}); export it anew"
        ) from error


def _extract(pypdf: Any, data: bytes, source: str) -> list[str]:  # noqa: ANN401 - a module
    reader = pypdf.PdfReader(io.BytesIO(data))
    # Many PDFs are encrypted with an empty password, which opens them for reading.
    if reader.is_encrypted and not reader.decrypt(""):
        raise IngestError(f"{source}: needs a password; save it without one")
    return [_clean(page.extract_text()) for page in reader.pages]


def _clean(text: str) -> str:
    # pypdf passes lone surrogates of broken fonts through; no tokenizer takes them.
    return text.encode("utf-8", "replace").decode("utf-8").strip()
