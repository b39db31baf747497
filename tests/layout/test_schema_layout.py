"""Spans as in the paper, and what every run attends."""

from __future__ import annotations

import pytest

from pc_rag.errors import LayoutError
from pc_rag.layout import ANONYMOUS_LABEL, ModuleLayout, RunItem, UnionLayout, lay_out, layout_rows
from pc_rag.pml import Module, Schema, Text, parse_schema
from pc_rag.types import Span, Visibility
from tests.support.char_encoder import CharEncoder, decode

NESTED = (
    '<schema name="s">head<module name="a">one<module name="x">XX</module>two'
    '<module name="y">YYY</module></module>mid<module name="b">bb</module></schema>'
)


def layout_of(document, *, visibility=Visibility.PREFIX, has_bos=False):
    encoder = CharEncoder(has_bos=has_bos)
    return lay_out(parse_schema(document), encoder, visibility=visibility)


def test_module_starts_behind_all_before_when_lengths_are_those_of_the_paper():
    """Preceding lengths 50 and 60 give start 110 (Prompt Cache, section 3.3)."""
    layout = layout_of(
        f'<schema name="s"><module name="a">{"a" * 50}</module>'
        f'<module name="b">{"b" * 60}</module><module name="c">{"c" * 5}</module></schema>'
    )
    assert [item.span for item in layout.items] == [Span(0, 50), Span(50, 110), Span(110, 115)]


def test_members_share_a_start_when_they_are_a_union():
    """The union reserves its longest member, and what follows starts behind that."""
    layout = layout_of(
        f'<schema name="s">{"t" * 110}<union><module name="a">{"a" * 30}</module>'
        f'<module name="b">{"b" * 45}</module></union>tail</schema>'
    )
    _, union, tail = layout.items
    assert isinstance(union, UnionLayout)
    assert [member.span for member in union.members] == [Span(110, 140), Span(110, 155)]
    assert union.span == Span(110, 155)
    assert tail.span == Span(155, 159)
    assert layout.span == Span(0, 159)


def test_nested_modules_start_relative_to_their_parent_when_text_surrounds_them():
    """A module holds its own text and its nested modules, one behind the other."""
    layout = layout_of(NESTED)
    _, a, mid, b = layout.items
    assert isinstance(a, ModuleLayout)
    assert (a.path, a.span) == ("a", Span(4, 15))
    assert [item.span for item in a.items] == [Span(4, 7), Span(7, 9), Span(9, 12), Span(12, 15)]
    assert a.items[1].path == "a.x"
    assert isinstance(mid, RunItem)
    assert (mid.span, b.span) == (Span(15, 18), Span(18, 20))


@pytest.mark.parametrize(
    ("visibility", "contexts"),
    [
        (
            Visibility.PREFIX,
            {
                "head": "",
                "one": "head",
                "XX": "headone",
                "two": "headone",
                "YYY": "headonetwo",
                "mid": "head",
                "bb": "headmid",
            },
        ),
        (
            Visibility.MODULE,
            {"head": "", "one": "", "XX": "", "two": "one", "YYY": "", "mid": "head", "bb": ""},
        ),
    ],
)
def test_run_attends_what_is_always_before_it_when_encoded(visibility, contexts):
    """Under prefix: anonymous text, and earlier runs of its module and of those around it."""
    layout = layout_of(NESTED, visibility=visibility)
    found = {
        decode(run.token_ids): decode(layout.context_of(index)[0])
        for index, run in enumerate(layout.runs)
    }
    assert found == contexts


def test_context_positions_are_reserved_ones_when_a_run_attends_others():
    """The context of a run lies where it was encoded, gaps included."""
    layout = layout_of(NESTED)
    index = next(i for i, run in enumerate(layout.runs) if decode(run.token_ids) == "two")
    assert layout.context_of(index)[1] == (0, 1, 2, 3, 4, 5, 6)


def test_control_tokens_join_the_text_around_them_when_a_schema_has_turns():
    """Adjacent always-included pieces are one run; BOS stands once, at the very start."""
    layout = layout_of(
        '<schema name="s"><system>Help.</system><user>Hi <module name="m">doc</module>'
        " bye</user></schema>",
        has_bos=True,
    )
    assert [(run.label, decode(run.token_ids)) for run in layout.runs] == [
        (ANONYMOUS_LABEL, "<bos><system>Help.</system><user>Hi "),
        ("m", "doc"),
        (ANONYMOUS_LABEL, " bye</user>"),
    ]
    assert layout.uses_roles
    assert layout.ends_in_user_turn
    assert layout.num_closing_tokens == 1


def test_first_turn_is_told_when_a_schema_has_several():
    """Templates that add a default system text do it once."""
    calls = []

    class Encoder(CharEncoder):
        def role_open(self, role, *, is_first):
            calls.append((str(role), is_first))
            return super().role_open(role, is_first=is_first)

    document = '<schema name="s"><system/><user/><assistant/></schema>'
    lay_out(parse_schema(document), Encoder(), visibility=Visibility.PREFIX)
    assert calls == [("system", True), ("user", False), ("assistant", False)]


def test_bos_is_a_run_of_its_own_when_a_module_stands_first():
    """The first position always holds BOS, whatever is imported."""
    layout = layout_of('<schema name="s"><module name="m">doc</module></schema>', has_bos=True)
    assert [decode(run.token_ids) for run in layout.runs] == ["<bos>", "doc"]
    assert layout.runs[1].span == Span(1, 4)


@pytest.mark.parametrize(
    "document",
    ['<schema name="s"/>', '<schema name="s"><module name="m"/><user/></schema>'],
)
def test_no_empty_run_arises_when_modules_are_empty(document):
    """A stored entry holds at least one token."""
    assert all(run.token_ids for run in layout_of(document).runs)


def test_control_text_stays_text_when_a_module_contains_it():
    """Text that looks like a turn gives no control token (pitfall 11)."""
    layout = layout_of(
        '<schema name="s"><module name="m">&lt;user&gt;<![CDATA[<bos>]]></module></schema>'
    )
    assert layout.runs[0].token_ids == tuple(map(ord, "<user><bos>"))


def test_scaffold_visibility_is_refused_when_a_schema_is_laid_out():
    """Scaffolds are parts of a schema."""
    with pytest.raises(LayoutError, match="not 'scaffold'"):
        layout_of('<schema name="s"/>', visibility=Visibility.SCAFFOLD)


def test_rows_say_it_all_when_a_layout_is_listed():
    """One row a node, in document order, for people to read."""
    layout = layout_of(
        '<schema name="s">head<module name="a">one<union><module name="x">XX</module>'
        '<module name="y">YYYY</module></union></module></schema>'
    )
    assert [
        (row.depth, str(row.kind), row.path, row.span, row.num_reserved, row.num_tokens)
        for row in layout_rows(layout)
    ] == [
        (0, "schema", "s", Span(0, 11), 11, 13),
        (1, "text", "", Span(0, 4), 4, 4),
        (1, "module", "a", Span(4, 11), 7, 9),
        (2, "text", "a", Span(4, 7), 3, 3),
        (2, "union", "a", Span(7, 11), 4, 6),
        (3, "module", "a.x", Span(7, 9), 4, 2),
        (4, "text", "a.x", Span(7, 9), 2, 2),
        (3, "module", "a.y", Span(7, 11), 4, 4),
        (4, "text", "a.y", Span(7, 11), 4, 4),
    ]


def test_nothing_of_a_module_is_stored_when_it_is_not_stored_itself():
    """Also where nodes were built in Python, and the inner module says nothing of it."""
    inner = Module("inner", (Text("secret"),))
    schema = Schema("s", (Module("outer", (Text("x"), inner), is_cached=False),))
    layout = lay_out(schema, CharEncoder(has_bos=False), visibility=Visibility.PREFIX)
    assert [run.is_stored for run in layout.runs] == [False, False]
