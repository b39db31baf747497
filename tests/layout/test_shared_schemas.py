"""Golden layouts of schemas that the authors of Prompt Cache published."""

from __future__ import annotations

import pytest

from pc_rag.layout import RowKind, lay_out, layout_rows, plan_prompt
from pc_rag.pml import parse_prompt, read_schema
from pc_rag.types import HitKind, ModuleKey, PositionPolicy, Span, Visibility
from tests.support.char_encoder import CharEncoder, decode
from tests.support.shared_schemas import BOOKSTORE, PARAMETERIZED, PERSONA


def golden(layout, *, max_depth):
    return [
        (row.path, row.span.start, row.span.end, row.num_reserved)
        for row in layout_rows(layout)
        if row.depth <= max_depth and row.kind in (RowKind.SCHEMA, RowKind.MODULE)
    ]


def test_layout_is_golden_when_modules_are_source_files(shared_schema):
    """Five files in a user turn; one token a character."""
    schema = read_schema(shared_schema(BOOKSTORE))
    layout = lay_out(schema, CharEncoder(), visibility=Visibility.PREFIX)
    assert golden(layout, max_depth=1) == [
        ("code-generation-bookstore", 0, 3548, 3548),
        ("book.py", 481, 1003, 522),
        ("user.py", 1003, 1529, 526),
        ("inventory.py", 1529, 1941, 412),
        ("store.py", 1941, 2804, 863),
        ("database.py", 2804, 3446, 642),
    ]


def test_code_keeps_its_shape_when_it_is_a_module(shared_schema):
    """Source files are Python after parsing, and named by tags with dots in prompts."""
    path = shared_schema(BOOKSTORE)
    layout = lay_out(read_schema(path), CharEncoder(), visibility=Visibility.PREFIX)
    prompt = parse_prompt(
        '<prompt schema="code-generation-bookstore"><book.py/><store.py/>Go.</prompt>'
    )
    plan = plan_prompt(
        layout,
        prompt,
        CharEncoder(),
        policy=PositionPolicy.RESERVED,
        entry_key=lambda index: ModuleKey(str(index)),
        max_position=4096,
    )
    head, book, store = plan.cached
    assert (head.hit_kind, book.hit_kind, store.hit_kind) == (
        HitKind.EXACT,
        HitKind.EXACT,
        HitKind.COMPOSED,
    )
    compile(decode(book.token_ids), "book.py", "exec")
    compile(decode(store.token_ids), "store.py", "exec")
    assert decode(plan.fresh[0].token_ids) == "Go."
    assert decode(plan.token_ids).endswith("Give me the instructions.</assistant><generate>")


def test_layout_is_golden_when_traits_are_unions(shared_schema):
    """Six unions of traits, each reserving its longest; one token a character."""
    schema = read_schema(shared_schema(PERSONA))
    layout = lay_out(schema, CharEncoder(), visibility=Visibility.PREFIX)
    assert golden(layout, max_depth=1) == [
        ("persona", 0, 6678, 6678),
        ("age", 844, 1716, 872),
        ("residence", 1716, 2965, 1249),
        ("education", 2965, 4101, 1136),
        ("occupation", 4101, 4825, 724),
        ("martial-status", 4825, 5815, 990),
        ("personality", 5815, 6439, 624),
    ]
    members = [row for row in golden(layout, max_depth=3) if row[0].startswith("personality.")]
    assert members == [
        ("personality.default", 5815, 6089, 624),
        ("personality.introverted", 5815, 6439, 624),
        ("personality.extroverted", 5815, 6420, 624),
        ("personality.analytical", 5815, 6395, 624),
        ("personality.creative", 5815, 6397, 624),
    ]


def test_layout_is_golden_when_modules_have_parameters(shared_schema):
    """Placeholders count as what they reserve, and cost no entry; one token a character."""
    schema = read_schema(shared_schema(PARAMETERIZED))
    layout = lay_out(schema, CharEncoder(), visibility=Visibility.PREFIX)
    rows = layout_rows(layout)
    assert [
        (str(row.kind), row.path, row.name, row.span.start, row.span.end, row.num_entries)
        for row in rows
        if row.depth <= 5 and row.kind is not RowKind.TEXT
    ][:9] == [
        ("schema", "travel", "travel", 0, 993, 13),
        ("module", "travel-plan", "travel-plan", 290, 882, 11),
        ("parameter", "travel-plan", "duration", 347, 352, 0),
        ("union", "travel-plan", "", 354, 882, 10),
        ("module", "travel-plan.domestic", "domestic", 354, 694, 1),
        ("parameter", "travel-plan.domestic", "city", 457, 467, 0),
        ("module", "travel-plan.overseas", "overseas", 354, 882, 9),
        ("union", "travel-plan.overseas", "", 463, 882, 8),
        ("module", "travel-plan.overseas.maldives", "maldives", 463, 874, 1),
    ]
    assert (rows[0].num_tokens, len(rows)) == (4065, 29)


@pytest.mark.parametrize("policy", list(PositionPolicy))
def test_trip_is_planned_when_a_prompt_gives_arguments(shared_schema, policy):
    """By a path and by nested imports alike; positions behind an argument stay."""
    layout = lay_out(
        read_schema(shared_schema(PARAMETERIZED)), CharEncoder(), visibility=Visibility.PREFIX
    )
    bodies = (
        '<travel-plan duration=" 3 d"><overseas><tokyo/></overseas></travel-plan>',
        '<travel-plan duration=" 3 d"/><travel-plan.overseas.tokyo/>',
    )
    nested, path = (
        plan_prompt(
            layout,
            parse_prompt(f'<prompt schema="travel">{body}Go.</prompt>'),
            CharEncoder(),
            policy=policy,
            entry_key=lambda index: ModuleKey(str(index)),
            max_position=None,
        )
        for body in bodies
    )
    assert nested == path
    head, before, argument, behind, *_ = nested.parts
    assert (head.hit_kind, before.hit_kind) == (HitKind.EXACT, HitKind.EXACT)
    assert decode(before.token_ids).endswith("for the duration of")
    assert (decode(argument.token_ids), argument.span) == (" 3 d", Span(347, 351))
    assert decode(behind.token_ids).startswith(".")
    assert behind.span.start == 352
