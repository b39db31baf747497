"""Prompts become plans: what is cached, what is fresh, and where it lies."""

from __future__ import annotations

import pytest

from pc_rag.errors import LayoutError
from pc_rag.types import PositionPolicy, Visibility
from tests.support.char_encoder import CharEncoder, decode
from tests.support.plans import plan_of, problems_of, shown

PLAIN = (
    '<schema name="s">head<union><module name="a">aaaa</module>'
    '<module name="b">bb</module></union><module name="c">ccc<module name="d">d</module>'
    "</module>tail</schema>"
)
CHAT = (
    '<schema name="s"><system>Sys</system><user>In<union><module name="a">aaaa</module>'
    '<module name="b">bb</module></union></user></schema>'
)


def test_spans_follow_each_other_when_packed():
    """Imports are moved together, text goes right behind them, the tail sees the text."""
    assert shown(plan_of(PLAIN, "<b/>Why?")) == [
        ("exact", "head", 0),
        ("exact", "bb", 4),
        ("text", "Why?", 6),
        ("text", "tail", 10),
    ]


def test_gaps_stay_when_reserved():
    """Every run keeps its reserved start; text fills the gap behind the import."""
    assert shown(plan_of(PLAIN, "<b/>W<c/>", policy=PositionPolicy.RESERVED)) == [
        ("exact", "head", 0),
        ("exact", "bb", 4),
        ("text", "W", 6),
        ("composed", "ccc", 8),
        ("text", "tail", 12),
    ]


def test_runs_are_pushed_when_text_is_longer_than_the_gap():
    """By the missing amount, until a gap takes it up; no text is lost."""
    assert shown(plan_of(PLAIN, "<b/>WWWWW<c/>", policy=PositionPolicy.RESERVED)) == [
        ("exact", "head", 0),
        ("exact", "bb", 4),
        ("text", "WWWWW", 6),
        ("composed", "ccc", 11),
        ("text", "tail", 14),
    ]
    assert shown(plan_of(PLAIN, "<b/>WWW<c/>", policy=PositionPolicy.RESERVED))[3:] == [
        ("composed", "ccc", 9),
        ("text", "tail", 12),
    ]


def test_key_and_rows_are_those_of_the_entry_when_a_run_is_moved():
    """The plan says which entry, where it was encoded, and how far it moves."""
    part = plan_of(PLAIN, "<c/>x").cached[1]
    assert (part.label, part.key, part.encoded_start, part.shift) == ("c", "key 3", 8, -4)
    assert (part.rows.start, part.rows.end) == (0, 3)


@pytest.mark.parametrize(
    ("policy", "visibility", "kinds"),
    [
        (PositionPolicy.PACKED, Visibility.PREFIX, ["exact", "exact", "composed", "composed"]),
        (PositionPolicy.RESERVED, Visibility.PREFIX, ["exact", "exact", "composed", "composed"]),
        (PositionPolicy.PACKED, Visibility.MODULE, ["exact", "composed", "composed", "composed"]),
    ],
)
def test_hit_is_exact_when_only_its_context_is_before_it(policy, visibility, kinds):
    """What saw less than a full prefill would show it is composed."""
    plan = plan_of(PLAIN, "<a/><c><d/></c>", policy=policy, visibility=visibility)
    assert [str(part.hit_kind) for part in plan.cached][:4] == kinds


def test_hit_is_exact_only_in_place_when_a_run_could_move():
    """A run behind a gap is exact where it was encoded, composed where it was moved to."""
    reserved = plan_of(PLAIN, "<c><d/></c>", policy=PositionPolicy.RESERVED)
    packed = plan_of(PLAIN, "<c><d/></c>", policy=PositionPolicy.PACKED)
    assert [str(part.hit_kind) for part in reserved.cached][:3] == ["exact"] * 3
    assert [str(part.hit_kind) for part in packed.cached][:3] == ["exact", "composed", "composed"]


def test_hit_is_composed_when_text_precedes_it():
    """A full prefill would show it the text."""
    plan = plan_of(PLAIN, "Look: <a/>")
    assert shown(plan) == [
        ("exact", "head", 0),
        ("text", "Look: ", 4),
        ("composed", "aaaa", 10),
        ("text", "tail", 14),
    ]


def test_hit_is_composed_when_text_hides_in_the_gap_before_it():
    """A run that did not move still has not seen the text in front of it."""
    assert shown(plan_of(PLAIN, "L<c/>", policy=PositionPolicy.RESERVED)) == [
        ("exact", "head", 0),
        ("text", "L", 4),
        ("composed", "ccc", 8),
        ("text", "tail", 12),
    ]


def test_question_joins_the_turn_when_it_stands_behind_an_import():
    """Closers come behind the question and are fresh, the assistant's turn is opened."""
    assert shown(plan_of(CHAT, "<b/> Why?", encoder=CharEncoder())) == [
        ("exact", "<bos><system>Sys</system><user>In", 0),
        ("exact", "bb", 9),
        ("text", " Why?", 11),
        ("text", "</user>", 16),
        ("text", "<generate>", 17),
    ]


def test_question_joins_the_last_user_turn_when_nothing_is_imported():
    """The closing tokens of the last run are cut off and come behind the question."""
    schema = '<schema name="s"><system>Sys</system><user>In: </user></schema>'
    assert shown(plan_of(schema, "Why?")) == [
        ("exact", "<system>Sys</system><user>In: ", 0),
        ("text", "Why?", 10),
        ("text", "</user>", 14),
        ("text", "<generate>", 15),
    ]


@pytest.mark.parametrize(
    ("schema", "body", "text"),
    [
        ('<system>Sys</system><module name="m">doc</module>', "<m/>Why?", "doc<user>Why?</user>"),
        ("<system>Sys</system>", "Why?", "</system><user>Why?</user>"),
        ("<user>Hi</user><assistant>Yes?</assistant>", "Why?", "</assistant><user>Why?</user>"),
        ("<user>Hi</user>.", "Why?", ".<user>Why?</user>"),
    ],
)
def test_text_becomes_a_user_turn_when_it_lies_in_none(schema, body, text):
    """In a schema with turns nothing is said outside of one by a prompt."""
    plan = plan_of(f'<schema name="s">{schema}</schema>', body)
    assert decode(plan.token_ids).endswith(f"{text}<generate>")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<c>X<d/></c>", "headcccXdtail"),
        ("<c><d/>X</c>", "headcccdXtail"),
        ("<c>X</c>", "headcccXtail"),
        ("<c><d>X</d></c>Y", "headcccdXYtail"),
        ("X<a/>Y<c>Z</c>", "headXaaaaYcccZtail"),
        ("X", "headtailX"),
    ],
)
def test_text_lies_in_its_block_when_imports_nest(body, text):
    """Behind the import before it, else in front of the one behind it, else at the end."""
    assert decode(plan_of(PLAIN, body).token_ids) == text


@pytest.mark.parametrize("policy", list(PositionPolicy))
def test_last_token_is_computed_when_all_are_stored(policy):
    """Cached modules only, no question: one token is recomputed (pitfall 6)."""
    plan = plan_of(PLAIN, "<a/><c/>", policy=policy)
    assert shown(plan)[-1] == ("repair", "l", plan.end - 1)
    assert plan.num_repaired_tokens == 1
    assert decode(plan.token_ids) == "headaaaaccctail"


def test_last_token_is_computed_when_a_module_ends_the_prompt():
    """Its logits choose the first new token, so other fresh tokens do not replace it."""
    schema = '<schema name="s"><module name="a">aaa</module></schema>'
    assert shown(plan_of(schema, "Why? <a/>")) == [
        ("text", "Why? ", 0),
        ("composed", "aa", 5),
        ("repair", "a", 7),
    ]


def test_prompt_is_refused_when_it_has_no_token():
    """There is nothing to generate from."""
    (problem,) = problems_of('<schema name="s"><module name="a">x</module></schema>', "")
    assert "has no token" in problem.message
    assert problem.line == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<x/>", "schema 's' has no module 'x'; it has a, b, c"),
        ("<cc/>", "did you mean <c/>?"),
        ("<c.dd/>", "did you mean <c.d/>?"),
        ("<d/>", "schema 's' has no module 'd'; write <c><d/></c> at the top of the prompt"),
        ("<c><a/></c>", "module 'c' has no module 'a'; write <a/> at the top of the prompt"),
        ("<d><e/></d>", "has no module 'd'"),
        ("<a/><b/>", "modules 'a' and 'b' are members of one union"),
        ("<a/><a/>", "module 'a' is already imported at line 1, column 20"),
        ("<c/><a/>", "module 'a' is imported behind 'c', but the schema declares it before"),
    ],
)
def test_import_is_refused_when_it_does_not_fit_the_schema(body, message):
    """Each message says what is wrong and what to write."""
    (problem,) = problems_of(PLAIN, body)
    assert message in problem.message
    assert (problem.line, problem.column >= 20) == (1, True)


def test_every_problem_is_reported_when_a_prompt_has_many():
    """One PromptError with places: wrong schema, union, order, unknown, overflow (pitfall 9)."""
    problems = problems_of(
        PLAIN, "\n<a/>\n<b/>\n<c>\n<x/></c>\n<a/>" + "q" * 100, name="other", max_position=50
    )
    assert [p.line for p in problems] == [1, 1, 3, 5, 6]
    assert "context overflow" in problems[0].message
    assert "schema 'other', but was given schema 's'" in problems[1].message


@pytest.mark.parametrize(("policy", "end"), [("packed", 11), ("reserved", 16)])
def test_overflow_is_refused_with_numbers_when_positions_run_out(policy, end):
    """The error says how many are needed and how many there are."""
    policy = PositionPolicy(policy)
    assert plan_of(PLAIN, "<b/>q", policy=policy, max_position=end).end == end
    with pytest.raises(LayoutError, match=rf"11 tokens .* up to {end}, the model has {end - 1}"):
        plan_of(PLAIN, "<b/>q", policy=policy, max_position=end - 1)


def test_work_stays_bounded_when_thousands_of_imports_are_unknown(monkeypatch):
    """Only the first are compared with every name of the schema; all of them are reported."""
    calls = []
    monkeypatch.setattr(
        "pc_rag.layout.import_block.get_close_matches", lambda *args, **_: calls.append(args) or []
    )
    body = "".join(f"<q{i}/>" for i in range(1000))
    problems = problems_of('<schema name="s"><module name="m">x</module></schema>', body)
    assert len(problems) == 1000
    assert len(calls) == 20


def test_context_holds_what_fits_when_an_import_does_not():
    """What is refused anyway takes no positions, so no overflow is reported beside it."""
    (problem,) = problems_of(PLAIN, "<a/><a/>Why?", max_position=16)
    assert "already imported" in problem.message
