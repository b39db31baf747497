"""What an engine is given by mistake: one error of its own, never one from inside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pc_rag.errors import ConfigError, PMLSyntaxError, PromptError, SchemaError
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import (
    Import,
    Prompt,
    Text,
    Turn,
    parse_prompt,
    parse_schema,
    program,
    write_prompt,
)
from pc_rag.pml.tree import MAX_DEPTH
from pc_rag.types import Role
from tests.support.engines import tiny_engine

SHORT = GenerationConfig(max_new_tokens=2)
SCHEMA = '<schema name="s"><module name="a">one <param name="p" len="3"/></module></schema>'


@program
def greeting(polite):
    """A program, to be passed where its schema or prompt belongs."""
    yield "Hi."
    if polite:
        yield "How are you?"


@pytest.fixture(scope="module")
def engine():
    """An engine that knows the schema; nothing here adds another."""
    engine = tiny_engine(only_ascii=True)
    engine.add_schema(SCHEMA)
    return engine


@pytest.mark.parametrize(
    ("children", "message"),
    [
        ((Import("a", arguments={"p": 3}),), "argument 'p' of Import('a') is 3 of type int"),
        ((Import("a", arguments={"p": b"x"}),), "is b'x' of type bytes"),
        ((Import("a", arguments=["x"]),), "arguments of Import('a') are ['x']"),
        ((Import(None),), "name of Import is None"),
        (("hello",), "write Text('hello')"),
        ((Text(None),), "text of Text is None"),
        (None, "children of Prompt('s') are None"),
    ],
)
def test_prompt_is_refused_when_it_was_built_of_other_values(engine, children, message):
    """A bare text among the children would be passed over in silence (pitfalls 9, 12)."""
    with pytest.raises(PromptError) as caught:
        engine.plan(Prompt("s", children))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "wrap", [lambda node: Import("a", (node,)), lambda node: Turn(Role.USER, (node,))]
)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 3_000])
def test_prompt_is_refused_when_it_nests_deeper_than_the_parser_reads(engine, wrap, depth):
    """Such as one that a loop built: an error of ours in a call and in a batch, no overflow."""
    node = Import("a")
    for _ in range(depth - 2):
        node = wrap(node)
    for run in (engine.plan, lambda prompt: engine.generate_batch([prompt], SHORT), write_prompt):
        with pytest.raises(PromptError, match=f"the {MAX_DEPTH} levels"):
            run(Prompt("s", (node,)))


def test_added_text_is_refused_when_it_is_none():
    """Where the rest was parsed, and is sound."""
    prompt = parse_prompt('<prompt schema="s"><a p="x"/></prompt>').with_text(None)
    with pytest.raises(PromptError, match="text of Text is None"):
        tiny_engine().plan(prompt)


@pytest.mark.parametrize("name", [None, 3, ["s"], {}])
def test_name_of_a_schema_is_refused_when_it_is_no_text(engine, name):
    """In a prompt, and where its use is announced."""
    with pytest.raises(PromptError, match="schema of Prompt"):
        engine.plan(Prompt(name))
    with pytest.raises(PromptError, match="the name of a schema is a text"):
        engine.prefetch(name)


@pytest.mark.parametrize("schema", [None, 3, b"<schema/>", ["s"], Prompt("s")])
def test_schema_is_refused_when_it_is_something_else(engine, schema):
    """The message says what may be given."""
    with pytest.raises(SchemaError, match=f"got a {type(schema).__name__}$"):
        engine.add_schema(schema)


def test_schema_is_refused_when_other_values_were_put_into_a_parsed_one(engine):
    """A bare text among its children would be passed over in silence (pitfall 12)."""
    schema = replace(parse_schema(SCHEMA), children=("hello",))
    with pytest.raises(SchemaError, match=r"write Text\('hello'\)"):
        engine.add_schema(schema)


def test_program_is_refused_with_advice_when_it_stands_for_its_schema_or_prompt(engine):
    """It is neither, and has both."""
    with pytest.raises(SchemaError, match=r"pass its \.schema"):
        engine.add_schema(greeting)
    for prompt in (greeting, greeting(True)):
        with pytest.raises(PromptError, match=r"build one with the program's prompt\(\.\.\.\)"):
            engine.generate(prompt, SHORT)


@pytest.mark.parametrize("prompts", [None, 3, {"a": 1}, iter(["a"]), Prompt("s")])
def test_batch_is_refused_when_its_prompts_are_no_list(engine, prompts):
    """A mapping would run its keys, an iterator has no length."""
    with pytest.raises(PromptError, match="give a list of prompts"):
        engine.generate_batch(prompts, SHORT)


@pytest.mark.parametrize("size", ["3", None, 2.5, True, 0])
def test_batch_is_refused_when_its_size_is_no_whole_number(engine, size):
    """The value is named."""
    with pytest.raises(ConfigError, match=f"at least 1; got {size!r}"):
        engine.generate_batch(["a"], SHORT, max_batch_size=size)


def test_config_is_refused_when_it_is_something_else(engine):
    """For one answer, for all of a batch, and for one of them."""
    with pytest.raises(ConfigError, match=r"config is a int; give a GenerationConfig"):
        engine.generate("a", 8)
    with pytest.raises(ConfigError, match="config is a dict"):
        engine.generate_batch(["a"], {"max_new_tokens": 8})
    with pytest.raises(ConfigError, match="prompt 1 of 2: config is a int"):
        engine.generate_batch(["a", "b"], [SHORT, 3])


@pytest.mark.parametrize("parse", [parse_schema, parse_prompt])
@pytest.mark.parametrize("document", [None, 3, ["<schema/>"]])
def test_document_is_refused_when_it_is_neither_text_nor_bytes(parse, document):
    """Before anything is read."""
    with pytest.raises(PMLSyntaxError, match=f"got {type(document).__name__}"):
        parse(document)


@pytest.mark.parametrize("text", ["a\ud800", "\udfff"])
def test_text_is_refused_when_it_holds_half_of_a_surrogate_pair(engine, text):
    """No tokenizer can read it: in an argument, in text of a prompt, and as a plain prompt."""
    for prompt in (Prompt("s", (Import("a", arguments={"p": text}),)), text):
        with pytest.raises(PromptError, match="lone surrogate"):
            engine.plan(prompt)
    with pytest.raises(PromptError, match="lone surrogate"):
        engine.plan(Prompt("s", (Text(text),)))
