"""Golden layouts of schemas that the authors of Prompt Cache published."""

from __future__ import annotations

from pc_rag.layout import RowKind, lay_out, layout_rows, plan_prompt
from pc_rag.pml import parse_prompt, read_schema
from pc_rag.types import HitKind, ModuleKey, PositionPolicy, Visibility
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


def test_layout_is_golden_when_texts_hold_parameters(shared_schema):
    """A union in a member of a union; each parameter reserves its length; one token a character."""
    schema = read_schema(shared_schema(PARAMETERIZED))
    layout = lay_out(schema, CharEncoder(), visibility=Visibility.PREFIX)
    assert golden(layout, max_depth=3) == [
        ("travel", 0, 993, 993),
        ("travel-plan", 290, 882, 592),
        ("travel-plan.domestic", 354, 694, 528),
        ("travel-plan.overseas", 354, 882, 528),
    ]
    parameters = [row for row in layout_rows(layout) if row.kind is RowKind.PARAMETER]
    assert [(row.name, row.path, row.span.start, row.span.end) for row in parameters] == [
        ("duration", "travel-plan", 347, 352),
        ("city", "travel-plan.domestic", 457, 467),
    ]
    cities = [row for row in golden(layout, max_depth=5) if row[0].count(".") == 2]
    assert len(cities) == 8
    assert {(start, num_reserved) for _, start, _, num_reserved in cities} == {(463, 419)}
    assert max(cities, key=lambda row: row[2]) == ("travel-plan.overseas.sahara", 463, 882, 419)
