"""The table of errors on the page of PML: each row is provoked, and says what came."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pc_rag import errors
from pc_rag.pml import Import, Prompt, Schema, Text, parse_prompt, parse_schema
from tests.support.engines import tiny_engine

PAGE = (Path(__file__).parents[2] / "docs" / "pml.md").read_text(encoding="utf-8")
TABLE = PAGE.split("\n### Errors\n")[1].split("\n## ")[0]
SCHEMA = """<schema name="s">
<module name="a">one<param name="p" len="3" default="x"/></module>
<union><module name="b">x<param name="q" len="3"/></module>
<module name="c"><module name="d">x</module></module></union>
<scaffold name="f"><module name="g">x</module><module name="h">y</module></scaffold>
<user><module name="i">x</module></user>
</schema>"""


def schema(content):
    return f'<schema name="s">{content}</schema>'


def prompt(content):
    return parse_prompt(f'<prompt schema="s">{content}</prompt>')


LONG_PATH = '<module name="%s">' % ("a" * 250) * 4 + "</module>" * 4
DOCUMENTS = (
    '<schema name="s"><module name="a"></schema>',
    schema("&nbsp;"),
    '<!DOCTYPE schema><schema name="s"/>',
    '<schema name="s" xmlns:a="b"/>',
    '<module name="m">' * 65 + "</module>" * 65,
    "<schema " + " ".join(f'a{number}=""' for number in range(1_001)) + "/>",
    b'<schema name="s">\xff</schema>',
    b'<?xml version="1.0" encoding="koi8-r"?><schema name="s"/>',
    schema("\ud800"),
    3,
    '<prompt schema="s"/>',
    "<schema/>",
    schema('<param name="p"/>'),
    '<schema name="s" nam="x"/>',
    schema('<module name="a" cache="no"/>'),
    schema('<module name="user"/>'),
    schema('<param name="schema" len="1"/>'),
    schema(LONG_PATH),
    schema("<union/>"),
    schema('<union><param name="a" len="1"/></union>'),
    schema("<user><system/></user>"),
    schema('<module name="a" src="file">x</module>'),
    schema('<module name="a" src="../a.txt"/>'),
    schema('<module name="a" src="link"/>'),
    schema('<module name="a" src="folder"/>'),
    schema('<module name="a" src="file"/>'),
)
ADDED = (
    schema('<param name="p" len="1" default="a b"/>'),
    Schema("s", ("x",)),
    Prompt("s"),
    schema('<param name="p" len="100000"/>'),
)
PROMPTS = (schema(""), "<prompt/>")
PLANNED = (
    Prompt("nix"),
    prompt("<aa/>"),
    prompt("<d/>"),
    prompt("<a/><a/>"),
    prompt('<b q=""/><c/>'),
    prompt("<f/><g/>"),
    prompt("<g/><a/>"),
    prompt('<a r="1"/>'),
    prompt("<b/>"),
    prompt('<b q="four"/>'),
    prompt("<user><i/></user>"),
    Prompt("t"),
    Prompt("s", (Text("\ud800"),)),
    Prompt("s", (Import("a", arguments={"p": 3}),)),
    Prompt("t", (Text("x" * 3_000),)),
)


def rows():
    """Of the table: the error's name, which is that of the row above where it is left out."""
    name = ""
    for cells in re.findall(r"^\| (.*?) \|.*\| `(.*)` \|$", TABLE, re.MULTILINE):
        name = cells[0].split("|")[0].strip(" `") or name
        yield name, cells[1]


@pytest.fixture(scope="module")
def provoke(tmp_path_factory):
    """Every mistake of this file, made one after the other: the errors that came."""
    root = tmp_path_factory.mktemp("root")
    (root / "folder").mkdir()
    (root / "file").write_bytes(b"\xff")
    (root / "link").symlink_to("file")
    engine = tiny_engine(only_ascii=True)
    engine.add_schema(SCHEMA)
    engine.add_schema('<schema name="t"><module name="a">x</module></schema>')
    found = []
    for run, inputs in (
        (lambda each: parse_schema(each, src_root=root), DOCUMENTS),
        (engine.add_schema, ADDED),
        (parse_prompt, PROMPTS),
        (engine.plan, PLANNED),
    ):
        for each in inputs:
            with pytest.raises(errors.PromptCacheError) as caught:
                run(each)
            found.append((type(caught.value).__name__, str(caught.value)))
    return found


def test_errors_are_those_of_the_table_when_mistakes_are_made(provoke):
    """Readers find the message they got, under the error they got, and the table says no more."""
    told = list(rows())
    assert len(told) == len(provoke) > 40
    for (name, message), (raised, text) in zip(told, provoke, strict=True):
        assert message in text
        assert raised == name
