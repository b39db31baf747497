"""Programs that nobody wrote by hand say in PML what they say in Python."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pc_rag.pml import parse_prompt, parse_schema, write_prompt, write_schema
from tests.support.modules import import_text
from tests.support.pml_program_text import arguments, program_texts
from tests.support.pml_text import prompt_text


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(text=program_texts(), data=st.data())
def test_prompt_says_what_the_function_says_when_a_program_is_random(text, data, tmp_path):
    """Whatever compiles means the same, with any arguments (pitfall 16)."""
    module = import_text(text, tmp_path)
    assert parse_schema(write_schema(module.made.schema)) == module.made.schema
    for _ in range(8):
        given_arguments = data.draw(arguments(module))
        prompt = module.made.prompt(*given_arguments)
        assert prompt_text(module.made.schema, prompt) == "".join(module.made(*given_arguments))
        assert parse_prompt(write_prompt(prompt)) == prompt
