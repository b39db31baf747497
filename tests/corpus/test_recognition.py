"""Chunks are found verbatim in prompts, whatever surrounds them."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.corpus.prefix_table import MIN_CHARS
from pc_rag.corpus.recognition import MIN_UNBOUNDED_CHARS, ChunkPart, Recognized, Recognizer
from pc_rag.corpus.rolling_hash import WindowHashes, code_points

CHUNK = "Caching stores the keys and values of a chunk once, for every later question."
OTHER = "Retrieval picks the chunks that a question needs; the order may change every time."


def recognizer_of(*texts):
    recognizer = Recognizer()
    recognizer.add_all((text, text) for text in texts)
    return recognizer


def wholes(recognizer, prompt):
    """Whole chunks in a prompt; parts have tests of their own."""
    return tuple(each for each in recognizer.find(prompt) if each.part is ChunkPart.WHOLE)


def texts_found(recognizer, prompt):
    found = wholes(recognizer, prompt)
    assert all(prompt[match.start : match.end] == match.chunk_id for match in found)
    return [match.chunk_id for match in found]


def is_inside_word(prompt, place):
    return 0 < place < len(prompt) and all(
        (char.isalnum() or char == "_") and ord(char) < 0x2E80
        for char in prompt[place - 1 : place + 1]
    )


def find_naively(texts, prompt):
    """The contract, by comparing every text at every place."""
    found, place = [], 0
    while place < len(prompt):
        fitting = [
            text
            for text in texts
            if len(text) >= MIN_CHARS
            and prompt.startswith(text, place)
            and (
                len(text) >= MIN_UNBOUNDED_CHARS
                or not (is_inside_word(prompt, place) or is_inside_word(prompt, place + len(text)))
            )
        ]
        if fitting:
            longest = max(fitting, key=len)
            found.append(Recognized(longest, place, place + len(longest)))
            place += len(longest)
        else:
            place += 1
    return tuple(found)


@st.composite
def corpora_and_prompts(draw):
    """Texts over few characters, so that they begin, end and overlap alike; prompts of them."""
    alphabet = draw(st.sampled_from(["a", "ab", "ab ", "ab 語🙂", "x_ é"]))
    piece = st.text(alphabet, min_size=1, max_size=40)
    texts = draw(st.lists(piece, min_size=1, max_size=12))
    texts += [text + more for text in texts for more in draw(st.lists(piece, max_size=2))]
    parts = draw(st.lists(st.one_of(st.sampled_from(texts), piece), max_size=12))
    return list(dict.fromkeys(texts)), draw(st.sampled_from(["", " ", "\n\n"])).join(parts)


@settings(max_examples=200, deadline=None)
@given(corpora_and_prompts(), st.data())
def test_matches_equal_naive_search_when_texts_overlap(case, data):
    """Longest at the leftmost place, over any split into additions and after removals."""
    texts, prompt = case
    recognizer = Recognizer()
    for text in texts:
        recognizer.add(text, text)
    removed = data.draw(st.sets(st.sampled_from(texts)))
    for text in removed:
        assert recognizer.remove(text)
    kept = [text for text in texts if text not in removed]
    assert wholes(recognizer, prompt) == find_naively(kept, prompt)
    back = data.draw(st.sets(st.sampled_from(texts)))
    recognizer.add_all((text, text) for text in back)
    assert wholes(recognizer, prompt) == find_naively({*kept, *back}, prompt)


@pytest.mark.parametrize("separator", ["\n\n", "\n", " ", "", "\n---\n", "</doc><doc>", "。"])
def test_chunks_are_found_when_joined_by_any_separator(separator):
    """Pitfall 35: frameworks join chunks with what their templates say."""
    prompt = separator.join(["Answer from this:", CHUNK, OTHER, "Question: why?"])
    assert texts_found(recognizer_of(CHUNK, OTHER), prompt) == [CHUNK, OTHER]


def test_chunk_is_found_when_a_metadata_header_precedes_it():
    """Pitfall 36: a header that changes, as a file's date does, costs no hit."""
    recognizer = recognizer_of(CHUNK)
    for date in ("2024-01-01", "2025-06-30"):
        header = f"file_path: /docs/cache.md\nlast_modified: {date}\n\n"
        assert texts_found(recognizer, f"{header}{CHUNK}\n\nQuestion: why?") == [CHUNK]


def test_chunk_is_found_twice_when_the_prompt_repeats_it():
    """A chunk that stands in a prompt twice is two matches."""
    assert texts_found(recognizer_of(CHUNK), f"{CHUNK} and again {CHUNK}") == [CHUNK, CHUNK]


def test_longest_wins_when_a_chunk_begins_another():
    """Of the chunks that begin at a place the longest is taken, and the rest where it is cut."""
    longer = f"{CHUNK} {OTHER}"
    recognizer = recognizer_of(CHUNK, longer)
    assert texts_found(recognizer, f"x {longer} x") == [longer]
    assert texts_found(recognizer, f"x {longer[:-1]} x") == [CHUNK]


def test_shorter_is_found_when_the_longer_one_in_another_table_is_removed():
    """A removed chunk does not hide a shorter one that begins alike."""
    recognizer = Recognizer()
    recognizer.add_all((f"{n}", f"filler number {n} for a large first table") for n in range(100))
    longer = f"{CHUNK} {OTHER}"
    recognizer.add("longer", longer)
    recognizer.add_all([("short", CHUNK)])
    recognizer.remove("longer")
    assert recognizer.find(longer) == (Recognized("short", 0, len(CHUNK)),)


def test_nothing_is_found_when_text_differs_by_one_character():
    """Verbatim means verbatim."""
    assert recognizer_of(CHUNK).find(CHUNK.replace("once", "twice")) == ()
    assert wholes(recognizer_of(CHUNK), CHUNK[:-1]) == ()
    assert recognizer_of(CHUNK).find("") == ()
    assert Recognizer().find(CHUNK) == ()


def test_short_text_is_left_alone_when_it_is_part_of_a_word():
    """Texts under 32 characters are found between words only; in unspaced scripts anywhere."""
    short = "semiconductor chips"
    recognizer = recognizer_of(short, "長い文章を短くするための十六文字以上")
    assert texts_found(recognizer, f"the {short}, again") == [short]
    assert recognizer.find(f"the {short}et factory") == ()
    assert recognizer.find(f"un{short}") == ()
    assert len(recognizer.find("これは長い文章を短くするための十六文字以上です")) == 1


def test_nothing_is_found_when_a_text_is_shorter_than_the_least():
    """Fifteen characters are too few; sixteen are enough."""
    assert recognizer_of("a" * (MIN_CHARS - 1)).find("a" * (MIN_CHARS - 1)) == ()
    assert len(recognizer_of("a" * MIN_CHARS).find("a" * MIN_CHARS)) == 1


def test_places_are_code_points_when_text_has_emoji_and_surrogates():
    """Starts and ends index the Python string; lone surrogates in a prompt do no harm."""
    chunk = "🙂 emoji and 漢字 in one chunk of text 🎉"
    prompt = f"🎈🎈\ud800 {chunk}🎈"
    assert recognizer_of(chunk).find(prompt) == (Recognized(chunk, 4, 4 + len(chunk)),)


def test_match_is_true_when_hashes_collide():
    """Thue-Morse strings collide in any polynomial hash mod 2**64; texts are compared."""
    word = "a"
    for _ in range(12):
        word += word.translate(str.maketrans("ab", "ba"))
    inverse = word.translate(str.maketrans("ab", "ba"))
    head = "x" * len(word)  # the two differ behind what the filter looks at
    length = np.array([2 * len(word)])
    hashes = {
        int(WindowHashes(code_points(head + tail)).at(length * 0, length)[0])
        for tail in (word, inverse)
    }
    assert len(hashes) == 1
    assert wholes(recognizer_of(head + word), head + inverse) == ()
    assert texts_found(recognizer_of(head + word), head + word) == [head + word]


def test_smallest_id_is_reported_when_two_ids_have_one_text():
    """Removing one of two ids leaves the other; an id can get another text."""
    recognizer = Recognizer()
    recognizer.add_all([("b", CHUNK), ("a", CHUNK)])
    assert recognizer.find(CHUNK) == (Recognized("a", 0, len(CHUNK)),)
    assert recognizer.remove("a")
    assert not recognizer.remove("a")
    assert recognizer.find(CHUNK) == (Recognized("b", 0, len(CHUNK)),)
    recognizer.add("b", OTHER)
    assert recognizer.find(CHUNK) == ()
    assert recognizer.find(OTHER) == (Recognized("b", 0, len(OTHER)),)
    assert len(recognizer) == 1
    assert "b" in recognizer


def test_tables_stay_few_when_chunks_are_added_one_by_one():
    """A search looks into every table, so their number grows with the logarithm at most."""
    recognizer = Recognizer()
    texts = [f"chunk number {n} of a growing corpus" for n in range(300)]
    for text in texts:
        recognizer.add(text, text)
    assert len(recognizer._tables) <= 4
    assert texts_found(recognizer, "\n".join(texts)) == texts


def test_tables_do_not_grow_when_a_chunk_comes_and_goes():
    """A text that is in a table is taken up again there; removed ones go in the end."""
    recognizer = recognizer_of(CHUNK, OTHER)
    for _ in range(50):
        recognizer.remove(CHUNK)
        recognizer.add(CHUNK, CHUNK)
    assert sum(len(table.texts) for table in recognizer._tables) == 2
    for n in range(50):
        recognizer.add("passing", f"passing text number {n} of one chunk")
    assert sum(len(table.texts) for table in recognizer._tables) <= 7


def test_chunk_is_found_when_it_came_back_before_tables_were_merged():
    """A text taken up again from a large table survives the merges of small ones."""
    fillers = [f"filler number {n} for a large first table" for n in range(100)]
    recognizer = recognizer_of(CHUNK, *fillers)
    recognizer.remove(CHUNK)
    recognizer.add(CHUNK, CHUNK)
    for n in range(30):
        recognizer.add(str(n), f"small addition number {n} to the corpus")
    assert texts_found(recognizer, f"{CHUNK} {fillers[3]}") == [CHUNK, fillers[3]]


def test_memory_is_given_back_when_most_chunks_are_removed():
    """Tables are made anew once more than half of their texts are gone."""
    fillers = [f"filler number {n} for a large first table" for n in range(100)]
    recognizer = recognizer_of(CHUNK, *fillers)
    for text in fillers:
        recognizer.remove(text)
    assert sum(len(table.texts) for table in recognizer._tables) <= 3
    assert texts_found(recognizer, f"{CHUNK} {fillers[3]}") == [CHUNK]


def test_known_chunks_are_always_found_when_others_come_and_go():
    """Searches run beside additions and removals, and never lose a chunk that is there."""
    recognizer = recognizer_of(CHUNK, OTHER)
    prompt = f"{CHUNK}\n\n{OTHER}"
    stop = threading.Event()

    def change():
        rng = random.Random(0)
        while not stop.is_set():
            name = str(rng.randrange(50))
            recognizer.add(name, f"passing chunk number {name} that comes and goes")
            recognizer.remove(str(rng.randrange(50)))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            assert texts_found(recognizer, prompt) == [CHUNK, OTHER]
    finally:
        stop.set()
        thread.join()
