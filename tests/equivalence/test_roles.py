"""One schema for models whose chats are written differently, and for one that knows no chat."""

from __future__ import annotations

import pytest

from pc_rag import ChatMessage, GenerationConfig, PromptCache, Role, parse_prompt
from pc_rag.model.loading import wrap_model
from tests.support.engines import reference_ids
from tests.support.tiny_models import CHATML_TEMPLATE, tiny_model, tiny_tokenizer

LLAMA_LIKE = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'system' %}{{ '[SYS] ' + m.content + ' [/SYS]\n' }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
SCHEMA = """
<schema name="guide">
  <system>Be brief<param name="tone" len="9" default=" and kind"/>.</system>
  <user>
    <module name="country">In <param name="name" len="8"/>. </module>
    <union><module name="sea">By the sea. </module><module name="hills">In the hills. </module></union>
  </user>
  <module name="seen"><assistant>I was there.</assistant></module>
</schema>
"""  # noqa: E501 - text between the members would be text of the schema
PROMPTS = {
    '<country name="Peru"/><hills/>Where?': [
        (Role.SYSTEM, "Be brief and kind."),
        (Role.USER, "In Peru. In the hills. Where?"),
    ],
    '<country name="Chad"/><sea/><seen/><user>When?</user><assistant>May.</assistant>Why?': [
        (Role.SYSTEM, "Be brief and kind."),
        (Role.USER, "In Chad. By the sea. "),
        (Role.ASSISTANT, "I was there."),
        (Role.USER, "When?"),
        (Role.ASSISTANT, "May."),
        (Role.USER, "Why?"),
    ],
}


@pytest.mark.parametrize("body", PROMPTS)
@pytest.mark.parametrize("template", [CHATML_TEMPLATE, LLAMA_LIKE, None])
def test_turns_are_those_of_the_models_own_chat_when_one_schema_serves_several(template, body):
    """The ids are those of the conversation that says the same, as the model renders it."""
    model, _ = tiny_model("llama", num_hidden_layers=2)
    loaded = wrap_model(model, tiny_tokenizer(chat_template=template))
    with PromptCache.from_pretrained(loaded) as engine:
        engine.add_schema(SCHEMA)
        prompt = parse_prompt(f'<prompt schema="guide">{body}</prompt>')
        request = engine.plan(prompt)
        conversation = [ChatMessage(role, text) for role, text in PROMPTS[body]]
        rendered = engine.chat_format.render(conversation)
        assert request.plan.token_ids == tuple(i for piece in rendered for i in piece.token_ids)
        answer = engine.generate(prompt, GenerationConfig(max_new_tokens=6))
        assert answer.metrics.num_cached_tokens > 0
        assert answer.token_ids == reference_ids(engine, request, 6)
