"""Every rule of PML, and that one error holds every broken one."""

from __future__ import annotations

import pytest

from pc_rag import pml
from pc_rag.errors import PromptError, SchemaError
from pc_rag.pml.validation import is_name


def problems_of(document, *, parse=pml.parse_schema, kind=SchemaError):
    with pytest.raises(kind) as caught:
        parse(document)
    return caught.value.problems


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<module>x</module>", '<module> has no name; write <module name="...">'),
        ('<module name="">x</module>', "name='' of <module> is not a name"),
        ('<module name="1st">x</module>', "begins with a letter or underscore"),
        ('<module name="-a">x</module>', "is not a name"),
        ('<module name="a b">x</module>', "is not a name"),
        ('<module name="a:b">x</module>', "is not a name"),
        ('<module name="user">x</module>', "cannot be named 'user'"),
        ('<module name="a" id="1">x</module>', "attribute 'id' of <module> is unknown; allowed: "),
        ('<module name="a" cache="false">x</module>', "'cache' of <module> is not supported by"),
        ('<module name="a" src="x.txt"/>', "attribute 'src' of <module> is not supported by"),
        ('<module name="a" xml:space="keep"/>', "allowed: 'preserve', 'default'"),
        ('<module name="a" xml:lang="de"/>', "attribute 'xml:lang' of <module> is unknown"),
        ("<union/>", "a <union> has no member"),
        ("<union>\n</union>", "a <union> has no member"),
        ('<union>x<module name="a"/></union>', "text 'x' in a <union>"),
        ("<union><union><module name='a'/></union></union>", "<union> in a <union>"),
        ("<union><user>x</user></union>", "<user> in a <union>, whose members must be modules"),
        ('<union scaffold="a"><module name="a"/></union>', "'scaffold' of <union> is not"),
        ('<union name="u"><module name="a"/></union>', "attribute 'name' of <union> is unknown"),
        ("<user><system>x</system></user>", "<system> inside <user>; a turn cannot hold another"),
        ("<user><module name='a'><user/></module></user>", "<user> inside <user>"),
        ('<user name="u">x</user>', "attribute 'name' of <user> is unknown"),
        ("<modul/>", "did you mean <module>?"),
        ("<b>x</b>", "unknown tag <b>; allowed: <module>, <union>, <assistant>"),
        ('<param name="p" len="3"/>', "<param> is not supported by this version"),
        ('<parameter name="p" length="abc"/>', "<parameter> is not supported by this version"),
        ('<scaffold name="p"/>', "<scaffold> is not supported by this version"),
    ],
)
def test_problem_is_named_and_located_when_a_schema_breaks_a_rule(body, message):
    """Each says what is wrong, where, and what is allowed (pitfall 15)."""
    (problem,) = problems_of(f'<schema name="s">\n  {body}</schema>')
    assert message in problem.message
    assert problem.line == 2
    assert problem.column >= 3


@pytest.mark.parametrize(
    "body",
    [
        '<module name="a"/>\n<module name="a"/>',
        '<union><module name="a"/>\n<module name="a"/></union>',
        '<module name="a"/>\n<union><module name="a"/></union>',
        '<system><module name="a"/></system>\n<user><module name="a"/></user>',
        '<module name="a"><module name="b"/></module>\n<module name="a.b"/>',
    ],
)
def test_names_are_refused_when_an_import_could_mean_two_modules(body):
    """Unions and roles add no level, and a path means one module (pitfall 15)."""
    (problem,) = problems_of(f'<schema name="s">{body}</schema>')
    assert "is already declared at line 1" in problem.message
    assert problem.line == 2


def test_names_repeat_when_their_modules_lie_in_different_modules():
    """A name counts within its enclosing module."""
    assert pml.parse_schema(
        '<schema name="s"><module name="a"><module name="x"/></module>'
        '<module name="b"><module name="x"/></module></schema>'
    )


def test_every_problem_is_reported_when_a_schema_has_many():
    """One error, all problems, in document order."""
    problems = problems_of(
        '<schema>\n<module name="1"/>\n<union>text\n</union>\n<x>\n<module/></x>\n'
        '<user>\n<user>\n<parameter name="p" length="abc"/></user></user></schema>'
    )
    assert [p.line for p in problems] == [1, 2, 3, 3, 5, 6, 8, 9]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('<prompt schema="s"/>', "the root element is <prompt>; expected <schema>"),
        ("<schema/>", '<schema> has no name; write <schema name="...">'),
        ('<schema name="9"/>', "is not a name"),
        ('<schema name="s" version="1"/>', "attribute 'version' of <schema> is unknown"),
    ],
)
def test_root_is_refused_when_it_is_no_schema(document, message):
    """The root has rules, too."""
    (problem,) = problems_of(document)
    assert message in problem.message
    assert (problem.line, problem.column) == (1, 1)


def test_every_problem_is_reported_when_a_prompt_has_many():
    """Prompt faults are PromptErrors with places."""
    problems = problems_of(
        '<prompt>\n<a x="1">\n<b y="2"/></a></prompt>', parse=pml.parse_prompt, kind=PromptError
    )
    assert [(p.line, p.column) for p in problems] == [(1, 1), (2, 1), (3, 1)]
    assert "has no schema" in problems[0].message
    assert "attribute 'x' of <a> is unknown" in problems[1].message


def test_root_is_refused_when_it_is_no_prompt():
    """A schema is no prompt."""
    (problem,) = problems_of('<schema name="s"/>', parse=pml.parse_prompt, kind=PromptError)
    assert "expected <prompt>" in problem.message


@pytest.mark.parametrize("name", ["a", "_", "book.py", "a-b_c.9", "é", "模块", "\uff41"])
def test_name_is_taken_when_it_can_be_a_tag(name):
    """What is a name is a tag without a colon: a module can be imported under it."""
    assert is_name(name)
    prompt = pml.parse_prompt(f'<prompt schema="s"><{name}/></prompt>')
    assert prompt.children[0].name == name


@pytest.mark.parametrize("name", ["", "1", ".a", "-a", "a b", "a:b", "²", "a²", "a\n", "a/", "😀<"])
def test_name_is_refused_when_it_cannot_be_a_tag(name):
    """No module has a name under which no prompt could import it."""
    assert not is_name(name)
