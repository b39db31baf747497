"""Calls read out of streamed text."""

from __future__ import annotations

import sys
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.model.conversation import ToolCall, ToolSpec
from pc_rag.model.tool_format import ToolFormat
from pc_rag.model.tool_parser import ToolCallParser

TAGGED = ToolFormat("<call>\n", "\n</call>", "\n", "name", "arguments")
BARE = ToolFormat("", "", None, "name", "parameters")
LISTED = ToolFormat("[CALLS]", "", "", "name", "arguments", True, ("[CALLS]",))
WRAPPED = ToolFormat('{"function": ', "}", "\n", "name", "arguments")
WEATHER = ToolSpec(
    "weather",
    "",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = ToolSpec("clock")
BODY = '{"name": "weather", "arguments": {"city": "a } </call> \\" é"}}'
CITY = 'a } </call> " é'
CALL = f"<call>\n{BODY}\n</call>"


class Answer:
    """An answer, fed in pieces."""

    def __init__(self, tool_format, text, size=1, **options):
        numbers = count(1)
        parser = ToolCallParser(
            tool_format, [WEATHER, CLOCK], make_id=lambda: f"id{next(numbers)}", **options
        )
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        self.released = [parser.feed(piece) for piece in pieces]
        parsed = parser.finish()
        self.text = "".join(self.released) + parsed.text
        self.calls = parsed.calls
        self.invalid = parsed.invalid
        self.names = [call.name for call in parsed.calls]
        self.errors = [invalid.error for invalid in parsed.invalid]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (CALL, ""),
        (f"\n{CALL}\n", ""),
        (f"Let me see.\n\n{CALL}", "Let me see."),
        (f"{CALL}\n\nDone. ", "Done. "),
        (f"{CALL[: -len('</call>')]}", ""),
        (f"A < B <cal {CALL} so", "A < B <cal so"),
        (BODY, ""),
        (f"  {BODY}", ""),
        (f"[1] {{x}} {CALL}", "[1] {x}"),
    ],
)
def test_call_is_found_when_text_stands_around_it(text, rest, size):
    """The call with its arguments and an identifier; all other text, once, whatever the pieces."""
    answer = Answer(TAGGED, text, size)
    assert answer.calls == (ToolCall("weather", {"city": CITY}, "id1"),)
    assert answer.text == rest
    assert answer.invalid == ()


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (TAGGED, f'{CALL}\n<call>\n{{"name": "clock", "arguments": {{}}}}\n</call>'),
        (TAGGED, f'{CALL}<call>{{"arguments": {{}}, "name": "clock"}}'),
        (TAGGED, f'{CALL} and <call>{{"name": "clock", "arguments": {{}}}}</call>'),
        (LISTED, f'[{BODY}, {{"name": "clock", "arguments": {{}}, "id": "123456789"}}]'),
        (
            WRAPPED,
            f'{{"function": {BODY}}}\n{{"function": {{"name": "clock", "arguments": {{}}}}}}',
        ),
        (BARE, (BODY + '\n{"name": "clock", "arguments": {}}').replace("arguments", "parameters")),
    ],
)
def test_calls_come_in_order_when_there_are_several(tool_format, text):
    """Each gets an identifier of its own."""
    answer = Answer(tool_format, text)
    assert [(call.name, call.id) for call in answer.calls] == [("weather", "id1"), ("clock", "id2")]
    assert answer.text in ("", "and")
    assert answer.invalid == ()


@pytest.mark.parametrize("tool_format", [TAGGED, BARE, LISTED, WRAPPED])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "No call.",
        " an answer\n",
        '{"name": "Bob", "age": 3}',
        '{"city": "Rome"} is JSON',
        '{"city": "Ro',
        "{not json}",
        "[1, 2] and [3]",
        '["weather"]',
        "<cal",
        "<" * 50,
        'see {"name": "weather"}',
    ],
)
def test_text_is_released_whole_when_it_holds_no_call(text, tool_format):
    """JSON of the user's own, false starts and white space lose nothing."""
    answer = Answer(tool_format, text)
    assert answer.text == text
    assert (answer.calls, answer.invalid) == ((), ())


def test_text_is_released_at_once_when_it_cannot_become_a_call():
    """Only white space and what begins like an opener is held back."""
    answer = Answer(TAGGED, "So <b> is")
    assert answer.released == ["S", "o", "", "", " <b", ">", "", " i", "s"]


def test_json_is_released_early_when_its_first_key_is_no_key_of_a_call():
    """A structured answer still streams."""
    answer = Answer(TAGGED, '{"city": "Rome", "people": 3}', 10)
    assert answer.released == ['{"city": "', 'Rome", "pe', 'ople": 3}']


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '<call>{"name": "wether", "arguments": {}}</call>',
            "no tool 'wether'; the tools are: 'wea",
        ),
        ('<call>{"name": ["clock"], "arguments": {}}</call>', "there is no tool"),
        ('<call>{"name": "weather", "arguments": {}}</call>', "lacks the arguments: 'city'"),
        (
            '<call>{"name": "weather", "arguments": {"city": "", "at": 1}}</call>',
            "unknown arguments: 'at'; it takes: 'city', 'unit'",
        ),
        ('<call>{"name": "weather", "arguments": "{}"}</call>', 'must be a JSON object; got "{}"'),
        ('<call>{"name": "weather"}</call>', "object with 'name' and 'arguments'"),
        ('<call>[{"name": "weather"}]</call>', "object with 'name' and 'arguments'"),
        ('<call>{"name": weather}</call>', "malformed"),
        ('<call>{"name": "weather</call>\n', "malformed"),
        ('<call>{"name": "weather", "arguments": {"city": "x"}</call>', "malformed"),
        ('<call>{"name": "clock", "arguments": {"a": NaN}}</call>', "NaN is no number"),
        ('<call>{"name": "clock", "arguments": {"a": 1e999}}</call>', "1e999 is no number"),
        ('<call>{"name": "clock", "arguments": {"a": "\\ud800"}}</call>', "lone surrogate"),
        ("<call>weather(city)</call>", "does not begin with JSON"),
        ("<call>", "ends before"),
        ('<call>{"name": "weather", "argu', "ends before"),
        ('{"name": "weather", "argu', "ends before"),
        ('{"name": "nobody", "arguments": {}}', "no tool 'nobody'"),
        ("<call>" + "[" * 500 + "</call>", "malformed"),
        ('<call>{"name": "' + "x" * 500 + '"}</call>', "longer than 200 characters"),
    ],
)
def test_call_is_invalid_when_it_does_not_fit(text, error):
    """The fault is named, and nothing of the call is released."""
    answer = Answer(TAGGED, text, max_call_chars=200)
    assert answer.text == ""
    assert answer.calls == ()
    assert len(answer.errors) == 1
    assert error in answer.errors[0]
    assert len(answer.invalid[0].raw) <= 200


def test_good_call_is_read_when_a_broken_one_precedes_it():
    """A broken call ends at its closer."""
    answer = Answer(TAGGED, f"<call>{{oops</call>\n{CALL}")
    assert answer.names == ["weather"]
    assert answer.invalid[0].raw == "{oops"


def test_each_call_is_judged_when_a_list_holds_several():
    """A bad one does not take the others with it."""
    answer = Answer(LISTED, f'[{BODY}, {{"name": "x", "arguments": {{}}}}]')
    assert answer.names == ["weather"]
    assert "no tool 'x'" in answer.errors[0]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    "text",
    [
        "Write `<call>` to call.",
        "Write <call>\n and a closer",
        f"{CALL} Write <call> again",
        "<call>" + "x" * 300 + " and <call> again",
    ],
)
def test_text_is_given_back_when_it_only_mentions_the_opener(text, size):
    """Neither JSON nor a closer follows; nothing of it is lost, and what is held is bounded."""
    answer = Answer(TAGGED, text, size, max_call_chars=100)
    assert answer.text == text.removeprefix(CALL).lstrip(" " if CALL in text else "")
    assert answer.invalid == ()


@pytest.mark.parametrize("text", ["<call>hello</call>", '<call>hello {"a"', "<call>", "<call>\n"])
def test_call_is_invalid_when_more_than_an_opener_was_written(text):
    """A closer or JSON was meant, or the answer was cut where a call begins."""
    answer = Answer(TAGGED, text)
    assert (answer.text, len(answer.invalid)) == ("", 1)


@pytest.mark.parametrize(
    ("patterns", "is_known"), [({"^x": {}}, True), ({"^y": {}}, False), ({"(": {}}, True)]
)
def test_argument_is_known_when_a_pattern_of_the_schema_fits(patterns, is_known):
    """``additionalProperties`` leaves out what ``patternProperties`` name."""
    tool = ToolSpec("f", "", {"patternProperties": patterns, "additionalProperties": False})
    parser = ToolCallParser(TAGGED, [tool], make_id=lambda: "1")
    parser.feed('<call>{"name": "f", "arguments": {"x1": 1}}</call>')
    assert bool(parser.finish().calls) is is_known


def test_held_text_is_bounded_when_json_never_ends():
    """JSON without an opener is released as text at the limit; so is endless white space."""
    text = '{"name": "' + "x" * 300
    answer = Answer(TAGGED, text, max_call_chars=100)
    assert answer.text == text
    assert max(map(len, answer.released)) <= 101
    assert len("".join(Answer(TAGGED, "a" + " " * 300, max_call_chars=100).released)) > 100


@pytest.mark.parametrize("seed", ['{"name": "', "<call>{", "<call", '[{"', '<call>{}</call>{"id"'])
def test_work_is_linear_when_a_model_repeats_itself(seed):
    """No more than a few calls of functions for each character."""

    def num_calls(text):
        events = []
        sys.setprofile(lambda _, event, __: events.append(event))
        try:
            Answer(TAGGED, text, 100, max_call_chars=1000)
        finally:
            sys.setprofile(None)
        return len(events)

    short, long = num_calls(seed * 200), num_calls(seed * 800)
    assert long < 5 * short


PIECES = ["<call>", "</call>", "\n", " ", BODY, '{"name": ', '"', "}", "{", "[", "<", "text", CALL]


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.integers(1, 9),
    st.sampled_from([TAGGED, BARE, LISTED, WRAPPED]),
)
def test_answer_is_the_same_when_it_comes_in_other_pieces(text, size, tool_format):
    """Text, calls and faults do not depend on how the stream is cut."""
    whole, cut = Answer(tool_format, text, 10_000), Answer(tool_format, text, size)
    assert (cut.text, cut.calls, cut.invalid) == (whole.text, whole.calls, whole.invalid)
