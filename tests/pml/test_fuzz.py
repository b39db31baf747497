"""The parser raises nothing but its own errors, whatever it is fed."""

from __future__ import annotations

import random
import time

import pytest

from pc_rag import pml
from pc_rag.errors import PMLError, PromptError

NUM_DOCUMENTS = 3_000
SECONDS_ALLOWED = 20

_PIECES = [
    "<schema name='s'>", "</schema>", "<module name='a'>", "<module name='b'>", "</module>",
    "<union>", "</union>", "<user>", "</user>", "<system>", "</system>", "<prompt schema='s'>",
    "</prompt>", "<a>", "<a/>", "</a>", "<!--", "-->", "<![CDATA[", "]]>", "<?pi", "?>", "&amp;",
    "&lt;", "&#65;", "&#0;", "&x;", "&", "<", ">", "'", '"', "=", "/", "\r\n", "\n", "  ", "\t",
    "text", "中", "😀", "\ufeff", "\x00", "\ud800", "xmlns='u'", "xml:space='preserve'",
    "<!DOCTYPE a>", "<?xml version='1.0'?>", "<parameter name='p' length='3'/>", "<x:y/>",
]  # fmt: skip
_SEED_DOCUMENT = (
    '<?xml version="1.0"?><schema name="s"><system>You &amp; I</system><user>Hi <module name="a">'
    '<!-- c -->text<union><module name="b"><![CDATA[<x>]]></module><module name="c">中</module>'
    "</union></module></user></schema>"
)


def random_document(rng):
    return "".join(rng.choice(_PIECES) for _ in range(rng.randrange(1, 25)))


def mutated_document(rng):
    document = list(_SEED_DOCUMENT)
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(document))
        match rng.randrange(4):
            case 0:
                document[place] = rng.choice(_PIECES)
            case 1:
                document.insert(place, rng.choice(_PIECES))
            case 2:
                del document[place : place + rng.randrange(1, 10)]
            case _:
                document[place] = chr(rng.randrange(0x250))
    return "".join(document)


def mutated_bytes(rng):
    document = bytearray(mutated_document(rng).encode("utf-8", "surrogatepass"))
    for _ in range(rng.randrange(3)):
        document[rng.randrange(len(document))] = rng.randrange(256)
    return bytes(document)


def error_of(parse, document):
    try:
        parse(document)
    except (PMLError, PromptError) as error:
        return error
    return None


@pytest.mark.parametrize("make", [random_document, mutated_document, mutated_bytes])
def test_only_own_errors_are_raised_when_documents_are_random(make):
    """Thousands of random and mutated documents parse or are refused, in bounded time."""
    rng = random.Random(make.__name__)
    start = time.process_time()
    errors = [
        error
        for document in (make(rng) for _ in range(NUM_DOCUMENTS))
        for parse in (pml.parse_schema, pml.parse_prompt)
        if (error := error_of(parse, document)) is not None
    ]
    assert time.process_time() - start < SECONDS_ALLOWED
    assert len(errors) > NUM_DOCUMENTS
    assert all(error.problems and str(error) for error in errors)
