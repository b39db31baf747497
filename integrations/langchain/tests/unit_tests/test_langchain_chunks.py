from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import PromptTemplate, format_document
from langchain_pc_rag import format_chunks, message_chunks
from langchain_pc_rag.chunks import mark_chunks

from pc_rag.corpus import Document, chunk_id_of
from pc_rag.errors import PromptError
from pc_rag.model.conversation import ChatMessage
from tests.support.corpora import CAT, DOG, FISH, SHORT, TEXTS, chunk_uses
from tests.support.langchain_stores import counted_corpus, texts_as_documents

HEADER = PromptTemplate.from_template("Source: {source}\nContent: {page_content}\n(end)")


def _texts(blocks):
    return [block["text"] for block in blocks]


def _chunks(blocks):
    return [block["text"] for block in blocks if "pc_rag" in block]


@pytest.mark.parametrize("separator", ["\n\n", "", " ", "\n---\n", "<user>"])
@pytest.mark.parametrize("document_prompt", [None, HEADER])
def test_blocks_join_to_what_a_stuff_chain_writes_when_documents_are_formatted(
    separator, document_prompt
):
    """Joined, the blocks are the documents written by the prompt, with separators between."""
    documents = texts_as_documents(CAT, "", "  " + DOG + " \n", FISH, source="a.txt")
    blocks = format_chunks(documents, separator=separator, document_prompt=document_prompt)
    prompt = document_prompt or PromptTemplate.from_template("{page_content}")
    expected = separator.join(format_document(each, prompt) for each in documents)
    assert "".join(_texts(blocks)) == expected
    assert all(_texts(blocks))


def test_each_document_is_a_block_with_its_key_when_formatted():
    """A document's block holds its text as a corpus keeps it, and the key of that chunk."""
    blocks = format_chunks(texts_as_documents(CAT, f"\n {DOG}  "))
    assert blocks == [
        {"type": "text", "text": CAT, "pc_rag": {"chunk": chunk_id_of(CAT)}},
        {"type": "text", "text": "\n\n\n "},
        {"type": "text", "text": DOG, "pc_rag": {"chunk": chunk_id_of(DOG)}},
        {"type": "text", "text": "  "},
    ]


def test_document_is_plain_text_when_the_prompt_does_not_write_it_verbatim():
    """A prompt that leaves the text out, or changes it, makes no chunk block."""
    prompt = PromptTemplate.from_template("Only {source}")
    blocks = format_chunks(texts_as_documents(source="a.txt"), document_prompt=prompt)
    assert blocks == [{"type": "text", "text": "Only a.txt\n\nOnly a.txt\n\nOnly a.txt"}]


def test_nothing_is_written_when_there_is_no_document():
    """No document gives no block."""
    assert format_chunks([]) == []


def test_chunks_are_marked_in_order_when_documents_stand_in_a_text():
    """The same text twice gives two blocks; a document that is not there is left out."""
    text = f"1: {CAT} 2: {CAT} 3: {DOG}."
    documents = texts_as_documents(CAT, FISH, CAT, DOG)
    blocks = mark_chunks(text, documents)
    assert "".join(_texts(blocks)) == text
    assert _chunks(blocks) == [CAT, CAT, DOG]


def test_later_document_is_still_marked_when_one_stands_out_of_order():
    """A document before the last one found is not looked for backwards."""
    blocks = mark_chunks(f"{CAT} {DOG} {FISH}", texts_as_documents(DOG, CAT, FISH))
    assert _chunks(blocks) == [DOG, FISH]


def test_short_document_is_found_where_it_stands_apart_when_a_word_holds_it():
    """A document whose text is part of a header's word is marked behind the header."""
    [header, chunk] = mark_chunks("Context: text", texts_as_documents("text"))
    assert (header["text"], chunk["text"]) == ("Context: ", "text")


def test_message_gives_text_and_chunks_when_it_holds_blocks():
    """What ``format_chunks`` wrote is read back: the whole text, and the chunks in order."""
    blocks = format_chunks(texts_as_documents(source="a.txt"), document_prompt=HEADER)
    message = SystemMessage(content=[{"type": "text", "text": "Read:\n"}, *blocks, "\nAnswer."])
    text, chunks = message_chunks(message)
    assert text == "Read:\n" + "".join(_texts(blocks)) + "\nAnswer."
    assert chunks == TEXTS


def test_block_is_plain_text_when_its_text_was_edited():
    """A block whose text is no longer its chunk's, as behind a redaction, names no chunk."""
    blocks = format_chunks(texts_as_documents(CAT, DOG))
    blocks[0] = blocks[0] | {"text": CAT.replace("cat", "[NAME]")}
    text, chunks = message_chunks(HumanMessage(content=blocks))
    assert text.startswith("The [NAME] sat")
    assert chunks == (DOG,)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain", "plain"),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a"}, "b"], "ab"),
        ([{"type": "text-plain", "mime_type": "text/plain", "text": "a file"}], "a file"),
        ([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "tool_use", "id": "1", "name": "f"}], "a"),
        ([{"type": "tool_call", "id": "1", "name": "f", "args": {}}], ""),
        ([{"type": "refusal", "refusal": "I will not."}], "I will not."),
        ([], ""),
    ],
)
def test_text_is_read_when_content_has_any_form(content, expected):
    """Texts are joined; thoughts and calls of tools are left out."""
    assert message_chunks(AIMessage(content=content)) == (expected, ())


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "url": "x"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "audio", "base64": "x"},
        {"type": "file", "file_id": "x"},
        {"type": "text-plain", "url": "x"},
        {"type": "server_tool_result", "tool_call_id": "1"},
        {"type": "text"},
        {"text": "no type"},
    ],
)
def test_block_is_refused_by_name_when_it_holds_no_text(block):
    """Media, and whatever else is no text, is an error that names the type, never dropped."""
    with pytest.raises(PromptError, match=repr(block.get("type"))):
        message_chunks(HumanMessage(content=["look:", block]))


def test_tool_answer_is_read_when_it_holds_blocks():
    """A tool's message is read like any other."""
    message = ToolMessage(content=format_chunks(texts_as_documents(CAT)), tool_call_id="1")
    assert message_chunks(message) == (CAT, (CAT,))


@pytest.mark.parametrize("separator", ["\n\n", "", " ", "\n---\n", "e"])
@pytest.mark.parametrize("document_prompt", [None, HEADER])
def test_chunks_are_hits_when_written_with_any_prompt_and_separator(separator, document_prompt):
    """Documents are served from the store whatever surrounds them, also too short to recognise."""
    documents = texts_as_documents(*TEXTS, "A cat.", source="a.txt")
    blocks = format_chunks(documents, separator=separator, document_prompt=document_prompt)
    text, chunks = message_chunks(HumanMessage(content=[*blocks, "\nWho sat?"]))
    with counted_corpus() as counted:
        counted.corpus.add([Document(each.page_content, is_whole=True) for each in documents])
        num_encoded = counted.num_encoded
        answer = counted.corpus.generate([ChatMessage("user", text, chunks=chunks)], SHORT)
        assert [use.hit_kind is not None for use in chunk_uses(answer)] == [True] * len(documents)
        assert counted.num_encoded == num_encoded
