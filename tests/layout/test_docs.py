"""The first example of the PML reference, from page to plan."""

from __future__ import annotations

import re
from pathlib import Path

from pc_rag.layout import lay_out, plan_prompt
from pc_rag.pml import parse_prompt, parse_schema
from pc_rag.types import ModuleKey, PositionPolicy, Visibility
from tests.support.char_encoder import CharEncoder, decode

PAGE = (Path(__file__).parents[2] / "docs" / "pml.md").read_text(encoding="utf-8")


def test_model_reads_the_whole_prompt_when_the_first_example_is_planned():
    """Whitespace rule, imports, question and turns together give readable text."""
    schema, prompt = re.findall(r"^```xml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[:2]
    encoder = CharEncoder()
    plan = plan_prompt(
        lay_out(parse_schema(schema), encoder, visibility=Visibility.PREFIX),
        parse_prompt(prompt),
        encoder,
        policy=PositionPolicy.PACKED,
        entry_key=lambda index: ModuleKey(str(index)),
        max_position=None,
    )
    assert decode(plan.token_ids) == (
        "<bos><system>You plan trips.</system><user>The traveller wants\n"
        "three thousand years of Rome.\nThe budget is\nsmall.\nPlan three days.</user><generate>"
    )
