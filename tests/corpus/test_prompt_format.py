"""The text that a corpus puts around its chunks."""

from __future__ import annotations

import pytest

from pc_rag.corpus import PromptFormat
from pc_rag.errors import ConfigError
from pc_rag.types import Role


def test_chunks_stand_between_header_and_question_when_asked():
    """Header, chunks with separators, question, in this order and nothing else."""
    prompt_format = PromptFormat(prefix="S", header="H:", separator="|", question="?{question}!")
    system, user = prompt_format.messages("why", ["a", "b"])
    assert (system.role, system.content) == (Role.SYSTEM, "S")
    assert (user.role, user.content) == (Role.USER, "H:a|b?why!")


def test_system_message_is_left_out_when_it_is_empty():
    """An empty system text sends no message; a template may have its own default."""
    (user,) = PromptFormat(prefix="").messages("why", [])
    assert user.role is Role.USER


@pytest.mark.parametrize("question", ["{x}", "{0} {", "}{question}{", "{{question}}", "%s"])
def test_question_is_kept_when_it_holds_braces(question):
    """A question is text, not a format string."""
    user = PromptFormat(question="Q: {question}").messages(question, ["{c}"])[-1]
    assert user.content.endswith(f"{{c}}Q: {question}")


def test_format_is_refused_when_the_question_has_no_place():
    """The model would never see what is asked."""
    with pytest.raises(ConfigError, match="lacks"):
        PromptFormat(question="Answer the question above.")
