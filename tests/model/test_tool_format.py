"""The format of calls, read off templates, and the schema of a forced call."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from pc_rag.errors import PromptError, UnsupportedModelError
from pc_rag.model.chat import ChatFormat
from pc_rag.model.conversation import ToolSpec
from pc_rag.model.tokenizer import TextTokenizer
from pc_rag.model.tool_format import ToolFormat, tool_call_schema
from tests.support import tool_templates as templates
from tests.support.tiny_models import CHATML_TEMPLATE, tiny_tokenizer

TAGGED = ToolFormat("<call>\n", "\n</call>", "\n", "name", "arguments")
LISTED = ToolFormat("[CALLS]", "", "", "name", "arguments", True, ("[CALLS]",))
WEATHER = ToolSpec("weather", "", {"type": "object", "properties": {"city": {"type": "string"}}})
CLOCK = ToolSpec("clock")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (templates.TAGGED_TEMPLATE, TAGGED),
        (templates.SAFE_TEMPLATE, TAGGED),
        (templates.TEXT_ARGUMENTS_TEMPLATE, TAGGED),
        (templates.BARE_TEMPLATE, ToolFormat("", "", None, "name", "parameters")),
        (templates.LIST_TEMPLATE, LISTED),
        (
            templates.WRAPPED_TEMPLATE,
            ToolFormat('<call>\n{"function": ', "}\n</call>", "\n", "name", "arguments"),
        ),
        ({"default": CHATML_TEMPLATE, "tool_use": templates.TAGGED_TEMPLATE}, TAGGED),
    ],
    ids=["tagged", "html-safe", "text-arguments", "bare", "list", "wrapped", "named"],
)
def test_format_is_found_when_the_template_writes_json(template, expected):
    """What stands around a call, the keys in it, and nothing of what ends the turn."""
    assert ChatFormat(templates.tool_tokenizer(template)).tool_format == expected


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (CHATML_TEMPLATE, "shows no tools"),
        (templates.DEAF_TEMPLATE, "shows no tools"),
        (None, "shows no tools"),
        (templates.XML_TEMPLATE, "otherwise than as JSON"),
    ],
)
def test_tools_are_refused_when_their_calls_cannot_be_read(template, fault):
    """No format, and an error that says why and what to do instead."""
    chat_format = ChatFormat(templates.tool_tokenizer(template))
    assert chat_format.tool_format is None
    with pytest.raises(UnsupportedModelError, match=fault) as caught:
        chat_format.require_tool_format()
    assert caught.value.capability == "tools"
    assert "JSON schema" in str(caught.value)


def test_opening_of_a_turn_is_no_prefix_when_templates_think_first():
    """What every answer in the history begins with does not belong to the call."""
    template = templates.TAGGED_TEMPLATE.replace(
        "+ m.role + '\n' + m.content",
        "+ m.role + '\n' + ('<think></think>' if m.role == 'assistant' else '') + m.content",
    )
    assert ChatFormat(templates.tool_tokenizer(template)).tool_format == TAGGED


def test_end_token_is_no_suffix_when_calls_end_otherwise_than_text():
    """The turn ends at a token that ends generation, whatever the template writes behind it."""
    template = templates.TAGGED_TEMPLATE.replace(
        "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}",
        "{{ '<|im_end|>' + ('#' if m.tool_calls else '') }}{% endif %}{% endfor %}",
    )
    assert ChatFormat(templates.tool_tokenizer(template)).tool_format == TAGGED


def test_end_of_the_turn_is_no_suffix_when_the_tokenizer_does_not_name_it():
    """What ends a turn of text ends one of calls."""
    hf = tiny_tokenizer(chat_template=templates.TAGGED_TEMPLATE)
    hf.eos_token = "<s>"
    assert ChatFormat(TextTokenizer(hf)).tool_format == TAGGED


@pytest.mark.parametrize("is_special", [False, True])
def test_tag_is_text_when_its_token_is_no_special_one(is_special):
    """Decoding leaves special tokens out, and keeps other added ones."""
    hf = tiny_tokenizer(chat_template=templates.TAGGED_TEMPLATE)
    hf.add_tokens([AddedToken("<call>", special=is_special, normalized=False)])
    found = ChatFormat(TextTokenizer(hf)).require_tool_format()
    assert found.prefix == "<call>\n"
    assert found.opener == ("" if is_special else "<call>")
    assert found.closer == "</call>"


def test_schema_is_that_of_the_tool_when_it_is_chosen():
    """Name as a constant, arguments by the tool's schema, both demanded, the text around."""
    prefix, schema, suffix = tool_call_schema(TAGGED, [CLOCK, WEATHER], "weather")
    assert (prefix, suffix) == ("<call>\n", "\n</call>")
    assert schema == {
        "type": "object",
        "properties": {"name": {"const": "weather"}, "arguments": WEATHER.parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def test_schema_offers_each_tool_when_any_may_be_called():
    """A list holds exactly one call; control tokens are no text of the answer."""
    prefix, schema, suffix = tool_call_schema(LISTED, [CLOCK, WEATHER])
    assert (prefix, suffix) == ("", "")
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    offered = schema["items"]["anyOf"]
    assert [item["properties"]["name"]["const"] for item in offered] == ["clock", "weather"]
    assert offered[0]["properties"]["arguments"] == {"type": "object"}


def test_references_resolve_when_schemas_of_tools_are_put_together():
    """Each tool's definitions stay its own, although both use the same names."""

    def tool(name, kind):
        return ToolSpec(
            name,
            "",
            {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/X"}, "y": {"items": [{"$ref": "#"}]}},
                "$defs": {"X": {"type": kind}},
            },
        )

    _, schema, _ = tool_call_schema(TAGGED, [tool("a", "string"), tool("b", "number")])

    def resolve(reference):
        target = schema
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
        return target

    kinds = []
    for offered in schema["anyOf"]:
        root = offered["properties"]["arguments"]["$ref"]
        arguments = resolve(root)
        kinds.append(resolve(arguments["properties"]["x"]["$ref"])["type"])
        assert arguments["properties"]["y"]["items"] == [{"$ref": root}]
    assert kinds == ["string", "number"]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(("tools", "choice"), [([], None), ([CLOCK], "weather")])
def test_forced_call_is_refused_when_there_is_no_such_tool(tools, choice):
    """The message names the tools there are."""
    with pytest.raises(PromptError, match=r"the tools are: ('clock'|none)"):
        tool_call_schema(TAGGED, tools, choice)
