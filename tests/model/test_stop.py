"""Stop strings across token borders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.errors import ConfigError
from pc_rag.model.stop import StopMatcher


def run(stops, chunks):
    matcher = StopMatcher(tuple(stops))
    pieces = [matcher.feed(chunk) for chunk in chunks]
    pieces.append(matcher.flush())
    return "".join(pieces), matcher.is_stopped


def naive(stops, text):
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    chunks=st.lists(st.text("ab\n", max_size=5), max_size=12),
)
def test_text_is_cut_at_the_earliest_stop_when_chunks_are_arbitrary(stops, chunks):
    """The stream equals the naive definition over the whole text."""
    assert run(stops, chunks) == naive(stops, "".join(chunks))


@settings(max_examples=200, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("abc", max_size=20),
)
def test_nothing_more_is_held_back_when_it_cannot_become_a_stop(stops, text):
    """What is held is the longest end of the text that begins a stop string, and no more."""
    matcher = StopMatcher(tuple(stops))
    released = "".join(map(matcher.feed, text))
    if matcher.is_stopped or any(stop in text for stop in stops):
        return
    held = max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))
    assert released == text[: len(text) - held]


def test_false_start_is_released_when_the_text_goes_on_otherwise():
    """Pitfall 18: a stop that does not come true is text."""
    matcher = StopMatcher(("\nUser:",))
    assert matcher.feed("Hi\nUser") == "Hi"
    assert matcher.feed("s are") == "\nUsers are"
    assert not matcher.is_stopped


def test_stop_is_found_when_it_is_split_over_tokens():
    """Pitfall 18: also over three tokens, and nothing behind it comes out."""
    matcher = StopMatcher(("\nUser",))
    assert [matcher.feed(text) for text in ("Hi\n", "Us", "er", ": more")] == ["Hi", "", "", ""]
    assert matcher.is_stopped
    assert matcher.flush() == ""


def test_earlier_candidate_wins_when_a_later_stop_is_complete_first():
    """``abcd`` begins before ``bc`` and may still come true."""
    assert run(("abcd", "bc"), "xabcd") == ("x", True)
    assert run(("abcd", "bc"), "xabce") == ("xa", True)
    assert run(("abcd", "bc"), "xabc") == ("xa", True)


def test_stop_is_found_when_it_overlaps_itself():
    """A failed attempt may hold the beginning of the next one."""
    assert run(("aab",), "aaab!") == ("a", True)
    assert run(("abab\n",), ["aba", "bab", "\n"]) == ("ab", True)


def test_empty_stop_is_refused_when_configured():
    """An empty string would stop everything."""
    with pytest.raises(ConfigError, match="empty"):
        StopMatcher(("a", ""))


def test_all_text_passes_when_there_are_no_stops():
    """Without stop strings nothing is held back."""
    matcher = StopMatcher()
    assert matcher.feed("text") == "text"
    assert matcher.flush() == ""
