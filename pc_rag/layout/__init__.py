"""From token counts to spans, and from a prompt to the plan of its request. Pure integers."""

from pc_rag.layout.corpus_plan import EntryPiece, Piece, TextPiece, plan_chunks
from pc_rag.layout.laying_out import lay_out
from pc_rag.layout.layout_rows import LayoutRow, RowKind, layout_rows
from pc_rag.layout.plan import (
    Cached,
    Fresh,
    FreshKind,
    Occurrence,
    Part,
    RequestPlan,
    Reused,
    split_cached,
)
from pc_rag.layout.prompt_plan import plan_prompt
from pc_rag.layout.repair import (
    LinkRepair,
    NoRepair,
    Repair,
    apply_repair,
    parse_repair,
    with_fresh_end,
)
from pc_rag.layout.schema_layout import (
    ANONYMOUS_LABEL,
    Item,
    ModuleLayout,
    ParameterLayout,
    Run,
    RunItem,
    ScaffoldLayout,
    SchemaLayout,
    UnionLayout,
)
from pc_rag.layout.tokenize import TextEncoder

__all__ = [
    "ANONYMOUS_LABEL",
    "Cached",
    "EntryPiece",
    "Fresh",
    "FreshKind",
    "Item",
    "LayoutRow",
    "LinkRepair",
    "ModuleLayout",
    "NoRepair",
    "Occurrence",
    "ParameterLayout",
    "Part",
    "Piece",
    "Repair",
    "RequestPlan",
    "Reused",
    "RowKind",
    "Run",
    "RunItem",
    "ScaffoldLayout",
    "SchemaLayout",
    "TextEncoder",
    "TextPiece",
    "UnionLayout",
    "apply_repair",
    "lay_out",
    "layout_rows",
    "parse_repair",
    "plan_chunks",
    "plan_prompt",
    "split_cached",
    "with_fresh_end",
]
