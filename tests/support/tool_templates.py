"""Small chat templates that know tools, one for each way of writing calls."""

from __future__ import annotations

from tokenizers import AddedToken

from pc_rag.model.tokenizer import TextTokenizer
from tests.support.tiny_models import tiny_tokenizer

_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

TAGGED_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools:\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<result>\n' + m.content + '\n</result><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
) + _PROMPT
"""Each call between tags, as models of the Hermes and Qwen kind write them."""

BARE_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>ipython\n' + m.content | tojson + '<|im_end|>\n' }}"
    "{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{{ \'<|im_start|>assistant\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson }}{{ '}<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.last and tools %}{{ tools | tojson(indent=4) + '\n\n' }}{% endif %}"
    "{{ m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
) + _PROMPT
"""One bare object, as Llama 3.1 writes it; text beside a call has no place."""

LIST_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if loop.last and tools %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ '[RESULT]{\"content\": ' + m.content | tojson + ', \"id\": \"' + m.tool_call_id + '\"}' }}"
    "{% elif m.role != 'assistant' %}{{ raise_exception('no such role') }}"
    "{% elif m.tool_calls %}{{ '[CALLS][' }}"
    "{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ ', \"id\": \"' + call.id + '\"}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
"""A list behind a control token, as Mistral's; identifiers of nine characters, no system role."""

SAFE_TEMPLATE = TAGGED_TEMPLATE.replace(
    "| tojson",
    "| tojson(ensure_ascii=True) | replace('<', '\\\\u003c') | replace('>', '\\\\u003e')",
)
"""JSON that is safe inside HTML, and ASCII only."""

TEXT_ARGUMENTS_TEMPLATE = TAGGED_TEMPLATE.replace(
    "{{ call.function.arguments | tojson }}{{ '}", "{{ call.function.arguments + '}"
)
"""Wants the arguments as JSON text, which it joins to its own."""

WRAPPED_TEMPLATE = TAGGED_TEMPLATE.replace('{"name"', '{"function": {"name"').replace(
    "}\n</call>", "}}\n</call>"
)
"""The call inside another object."""

XML_TEMPLATE = TAGGED_TEMPLATE.replace(
    '{{ \'<call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</call>' }}",
    "{{ '<call name=' + call.function.name + '>' }}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ '<' + key + '>' + value | string + '</' + key + '>' }}{% endfor %}{{ '</call>' }}",
)
"""Calls as elements, which are not JSON."""

DEAF_TEMPLATE = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
) + _PROMPT
"""Knows neither tools nor their answers."""


def tool_tokenizer(template: str | dict[str, str], **options: object) -> TextTokenizer:
    """A byte-level tokenizer with a template; the list template's tokens are special ones."""
    hf = tiny_tokenizer(chat_template=template, **options)
    names = ("[TOOLS]", "[/TOOLS]", "[INST]", "[/INST]", "[RESULT]", "[CALLS]")
    if template == LIST_TEMPLATE:
        hf.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return TextTokenizer(hf)
