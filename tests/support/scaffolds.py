"""Scaffolds over the texts of ``corpora``: their chunks, prompts that hold them, what is read."""

from __future__ import annotations

from pc_rag.corpus import chunk_id_of
from tests.support.corpora import TEXTS

CAT_ID, DOG_ID, FISH_ID = map(chunk_id_of, TEXTS)
SEPARATOR = "\n\n"


def prompt(corpus, *texts, between=SEPARATOR, before="", question="Who sat?"):
    """A question about texts, as the corpus would put it."""
    return corpus.prompt_format.messages(question, [before + between.join(texts)])


def read(request):
    """What is read of chunks: text, key and hit kind of each part."""
    parts = [part for part in request.plan.cached if part.label != "(prefix)"]
    return [(bytes(part.token_ids).decode(), part.key, part.hit_kind) for part in parts]


def texts_read(request):
    return [text for text, _, _ in read(request)]


def num_keys(request):
    return len({key for _, key, _ in read(request)})
