"""Minimal PDF files in memory: one line of text a page."""

from __future__ import annotations

import io

import pypdf
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject


def make_pdf(*pages, password=None):
    """A PDF whose pages hold these lines; an empty string is a page without text."""
    writer = pypdf.PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for line in pages:
        page = writer.add_blank_page(300, 300)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({line}) Tj ET".encode() if line else b"")
        page[NameObject("/Contents")] = writer._add_object(stream)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    data = io.BytesIO()
    writer.write(data)
    return data.getvalue()
