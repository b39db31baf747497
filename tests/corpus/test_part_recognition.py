"""Heads and tails of chunks are found between whole ones, and nothing shorter counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.corpus.part_table import MAX_LEAST_CHARS, MIN_PART_CHARS, least_part
from pc_rag.corpus.recognition import ChunkPart, Recognized, Recognizer

HEAD, TAIL, WHOLE = ChunkPart.HEAD, ChunkPart.TAIL, ChunkPart.WHOLE


def words(seed, num_chars):
    """Made-up text of a length, which no other seed gives a part of."""
    rng = random.Random(seed)
    text = " ".join(f"{rng.getrandbits(24):x}" for _ in range(num_chars // 4 + 8))
    return "".join(f"{seed}:{text}"[:num_chars])


CHUNK = words(1, 400)
OTHER = words(2, 400)


def recognizer_of(*texts):
    recognizer = Recognizer()
    recognizer.add_all((text, text) for text in texts)
    return recognizer


def shown(recognizer, prompt):
    """What was found, as (part, characters of the prompt)."""
    return [(each.part, prompt[each.start : each.end]) for each in recognizer.find(prompt)]


def common(left, right):
    """How many characters two texts begin with alike."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def longest_part(texts, standing):
    """The longest counting head of any text in what stands at a place."""
    sizes = [(common(text, standing), text) for text in texts if len(text) > MIN_PART_CHARS]
    return max((n for n, text in sizes if n >= least_part(len(text))), default=0)


def heads_naively(texts, prompt, taken):
    """``taken`` and the heads around it, by comparing every text at every place."""
    found, place = [], 0
    ends = [each.start for each in taken] + [len(prompt)]
    while place < len(prompt):
        inside = next((each for each in taken if each.start <= place < each.end), None)
        if inside:
            place = inside.end
            continue
        num_chars = longest_part(texts, prompt[place : min(e for e in ends if e > place)])
        if num_chars:
            found.append((place, place + num_chars))
        place += num_chars or 1
    return found


def find_naively(texts, prompt, wholes):
    """The contract of heads and tails; the latter are heads read backwards."""
    heads = [Recognized("", *ends, HEAD) for ends in heads_naively(texts, prompt, wholes)]
    taken = sorted((*wholes, *heads), key=lambda each: each.start)
    size = len(prompt)
    mirrored = [Recognized("", size - each.end, size - each.start) for each in reversed(taken)]
    backwards = heads_naively([text[::-1] for text in texts], prompt[::-1], mirrored)
    tails = [
        Recognized(
            "", size - start - len(prompt[size - end : size - start].lstrip()), size - start, TAIL
        )
        for start, end in backwards
        if prompt[size - end : size - start].strip()
    ]
    found = sorted((*taken, *tails), key=lambda each: each.start)
    return [(each.start, each.end, each.part) for each in found]


@st.composite
def corpora_and_prompts(draw):
    """Texts that share heads, tails and middles, and prompts of pieces of them."""
    alphabet = draw(st.sampled_from(["a", "ab", "a ", "ab 語🙂"]))
    run = st.builds(
        lambda character, size: character * size, st.sampled_from(alphabet), st.integers(1, 150)
    )
    block = st.one_of(run, st.text(alphabet, min_size=1, max_size=12), st.just(words(3, 70)))
    blocks = draw(st.lists(block, min_size=1, max_size=6))
    some = st.lists(st.sampled_from(blocks), min_size=1, max_size=6).map("".join)
    texts = draw(st.lists(some, min_size=1, max_size=8, unique=True))
    piece = st.builds(
        lambda text, start, end: text[start : max(start, len(text) - end)],
        st.sampled_from(texts), st.integers(0, 40), st.integers(0, 40),
    )  # fmt: skip
    parts = draw(st.lists(st.one_of(piece, st.sampled_from(blocks)), max_size=8))
    return texts, draw(st.sampled_from(["", " ", "\n---\n"])).join(parts)


@settings(max_examples=150, deadline=None)
@given(corpora_and_prompts(), st.data())
def test_parts_equal_naive_search_when_texts_overlap(case, data):
    """Longest heads at the leftmost place, then tails likewise, after additions and removals."""
    texts, prompt = case
    recognizer = Recognizer()
    cut = data.draw(st.integers(0, len(texts)))
    recognizer.add_all((text, text) for text in texts[:cut])
    recognizer.add_all((text, text) for text in texts[cut:])
    live = set(texts)
    for _ in range(2):
        for text in data.draw(st.sets(st.sampled_from(texts))):
            if text in live:
                recognizer.remove(text)
                live.discard(text)
            else:
                recognizer.add(text, text)
                live.add(text)
        found = recognizer.find(prompt)
        wholes = [each for each in found if each.part is WHOLE]
        expected = find_naively(live, prompt, wholes)
        assert [(each.start, each.end, each.part) for each in found] == expected
        for each in found:
            standing = prompt[each.start : each.end]
            assert each.chunk_id in live
            assert each.part is TAIL or each.chunk_id.startswith(standing)
            assert each.part is HEAD or each.chunk_id.endswith(standing)


@pytest.mark.parametrize("cut", [200, 256, 300, 399])
def test_chunk_is_found_in_two_prompts_when_it_is_split_between_them(cut):
    """Pitfall 38: its head ends one context, its tail begins the next, with an overlap."""
    recognizer = recognizer_of(CHUNK, OTHER)
    first = f"Context:\n{OTHER}\n\n{CHUNK[:cut]}\n---\nQuestion?"
    second = f"Context:\n{CHUNK[cut - 100 :]}\n\n{OTHER}\n---\nQuestion?"
    is_long = cut >= least_part(len(CHUNK))
    assert shown(recognizer, first) == [(WHOLE, OTHER)] + [(HEAD, CHUNK[:cut])] * is_long
    is_long = len(CHUNK) - cut + 100 >= least_part(len(CHUNK))
    assert shown(recognizer, second) == [(TAIL, CHUNK[cut - 100 :])] * is_long + [(WHOLE, OTHER)]


@pytest.mark.parametrize("num_chars", [65, 127, 128, 129, 256, 257, 384, 385, 511, 512, 513, 4_000])
def test_part_counts_from_its_least_length_on(num_chars):
    """Half of the chunk or more, at least 64 characters; 256 are enough of the longest."""
    chunk = words(5, num_chars)
    least = least_part(num_chars)
    assert MIN_PART_CHARS <= least <= MAX_LEAST_CHARS
    assert 2 * least >= min(num_chars, 2 * MAX_LEAST_CHARS)
    recognizer = recognizer_of(chunk)
    for size in (least - 1, least):
        head, tail = chunk[:size], chunk[-size:]
        is_long = size == least
        assert shown(recognizer, f"x {head}") == [(HEAD, head)] * is_long
        assert shown(recognizer, f"{tail}- x") == [(TAIL, tail.lstrip())] * is_long


def test_chunk_has_no_parts_when_it_is_short():
    """Of 64 characters only the whole is found."""
    chunk = words(6, MIN_PART_CHARS)
    assert shown(recognizer_of(chunk), chunk) == [(WHOLE, chunk)]
    assert shown(recognizer_of(chunk), chunk[:-1]) == []


def test_shared_header_is_no_part_when_chunks_are_longer():
    """Metadata that many chunks begin with costs nothing and counts as nothing."""
    header = words(7, 200)
    recognizer = recognizer_of(*(header + words(n, 600) for n in range(20, 60)))
    assert shown(recognizer, f"{header}\nsomething else") == []


def test_whole_chunk_wins_when_a_longer_one_begins_alike():
    """Parts lie between whole chunks, never over them."""
    longer = f"{CHUNK}\n{OTHER}"
    recognizer = recognizer_of(CHUNK, longer, OTHER)
    assert shown(recognizer, longer[:-1]) == [(WHOLE, CHUNK), (HEAD, OTHER[:-1])]
    assert shown(recognizer, longer[1:]) == [(TAIL, CHUNK[1:]), (WHOLE, OTHER)]


def test_longest_head_is_of_the_chunk_that_goes_on_alike():
    """Of thousands of chunks with one head, the one that has most of it is said."""
    head = words(8, 300)
    chunks = [f"{head}{n:04} {words(n, 300)}" for n in range(100, 1_100)]
    recognizer = recognizer_of(*chunks)
    (found,) = recognizer.find(f"x|{chunks[500][:350]}|x")
    assert (found.chunk_id, found.end - found.start) == (chunks[500], 350)
    backwards = recognizer_of(*(chunk[::-1] for chunk in chunks))
    (found,) = backwards.find(f"x|{chunks[500][:350][::-1]}|x")
    assert (found.chunk_id, found.end - found.start) == (chunks[500][::-1], 350)


@pytest.mark.parametrize("space", ["", " ", "\n", "\n\n"])
def test_space_in_front_of_a_tail_is_no_part_of_it(space):
    """It ends what stands before, a header of the prompt, which is the same in every prompt."""
    chunk = f"{CHUNK}{space}{OTHER}"
    assert shown(recognizer_of(chunk), f"Context:{space}{OTHER}|") == [(TAIL, OTHER)]


def test_removed_chunk_is_found_in_no_part():
    """Nor does it hide the one beside it; it is found again when it comes back."""
    twin = CHUNK[:300] + OTHER
    recognizer = recognizer_of(CHUNK, twin)
    prompt = f"{CHUNK[:350]}|x"
    assert recognizer.find(prompt) == (Recognized(CHUNK, 0, 350, HEAD),)
    recognizer.remove(CHUNK)
    assert recognizer.find(prompt) == (Recognized(twin, 0, 300, HEAD),)
    assert recognizer.find(CHUNK[-300:]) == ()
    recognizer.add(CHUNK, CHUNK)
    assert recognizer.find(prompt) == (Recognized(CHUNK, 0, 350, HEAD),)
    recognizer.remove(twin)
    recognizer.remove(CHUNK)
    assert recognizer.find(prompt) == ()


def test_part_is_true_when_hashes_collide():
    """Thue-Morse strings collide in any polynomial hash mod 2**64; texts are compared."""
    word = "a"
    for _ in range(12):
        word += word.translate(str.maketrans("ab", "ba"))
    inverse = word.translate(str.maketrans("ab", "ba"))
    recognizer = recognizer_of(word)
    for each in recognizer.find(inverse):
        standing = inverse[each.start : each.end]
        assert word.startswith(standing) if each.part is HEAD else word.endswith(standing)
