"""Every rule of PML, and that one error holds every broken one."""

from __future__ import annotations

import pytest

from pc_rag import pml
from pc_rag.errors import PMLSyntaxError, PromptError, SchemaError
from pc_rag.pml.names import is_name


def problems_of(document, *, parse=pml.parse_schema, kind=SchemaError):
    with pytest.raises(kind) as caught:
        parse(document)
    return caught.value.problems


PAIR = '<module name="x"/><module name="y"/>'
UNCACHED_NOT = '<module name="c" cache="true"/>'
SCAFFOLD = f'<scaffold name="s">{PAIR}'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<module>x</module>", '<module> has no name; write <module name="...">'),
        ('<module name="">x</module>', "name='' of <module> is not a name"),
        ('<module name="1st">x</module>', "begins with a letter or underscore"),
        ('<module name="-a">x</module>', "is not a name"),
        ('<module name="a b">x</module>', "is not a name"),
        ('<module name="a:b">x</module>', "is not a name"),
        (f'<module name="{"a" * 256}">x</module>', "255 characters at most"),
        ('<module name="user">x</module>', "a module cannot be named 'user'"),
        ('<module name="a" id="1">x</module>', "attribute 'id' of <module> is unknown; allowed: "),
        ('<module name="a" xml:space="keep"/>', "allowed: 'preserve', 'default'"),
        ('<module name="a" xml:lang="de"/>', "attribute 'xml:lang' of <module> is unknown"),
        ('<module name="a\tb"/>', "'name' of <module> holds a tab, which XML reads as a space"),
        ('<module name="a" cache="no"/>', "'cache' of <module> has value 'no'; allowed: 'true', "),
        (
            '<module name="a" cache="false"><user><module name="b" cache="true"/></user></module>',
            'cache="true" in a module with cache="false"',
        ),
        (
            f'<module name="a" cache="false"><module name="b">{UNCACHED_NOT}</module></module>',
            'cache="true" in a module with cache="false"',
        ),
        ('<module name="a" src="x.txt"/>', "src='x.txt' of <module> names a file, which is"),
        ("<union/>", "a <union> has no member"),
        ("<union>\n</union>", "a <union> has no member"),
        ('<union>x<module name="a"/></union>', "text 'x' in a <union>"),
        ("<union><union><module name='a'/></union></union>", "<union> in a <union>"),
        (f"<union>{SCAFFOLD}</scaffold></union>", "<scaffold> in a <union>, whose members must be"),
        ("<union><user>x</user></union>", "<user> in a <union>, whose members must be modules"),
        ("<union><param name='p' len='1'/></union>", "<param> in a <union>, whose members must be"),
        (f'<union scaffold="z">{PAIR}</union>', "names no member of it; it has x, y"),
        (f'<union scaffold="">{PAIR}</union>', "scaffold='' of <union> names no member"),
        (f'<union scaffold="\nx">{PAIR}</union>', "'scaffold' of <union> holds a line break"),
        ('<union name="u"><module name="a"/></union>', "attribute 'name' of <union> is unknown"),
        ("<user><system>x</system></user>", "<system> inside <user>; a turn cannot hold another"),
        ("<user><module name='a'><user/></module></user>", "<user> inside <user>"),
        ('<user name="u">x</user>', "attribute 'name' of <user> is unknown"),
        ("<modul/>", "did you mean <module>?"),
        ("<scafold/>", "did you mean <scaffold>?"),
        (
            "<b>x</b>",
            "unknown tag <b>; allowed: <module>, <union>, <scaffold>, <param>, <parameter",
        ),
        ('<scaffold name="s"/>', "a <scaffold> has 0 of at least 2 members"),
        ('<scaffold name="s"><module name="a"/></scaffold>', "has 1 of at least 2 members"),
        (f"<scaffold>{PAIR}</scaffold>", '<scaffold> has no name; write <scaffold name="...">'),
        (f'<scaffold name="2">{PAIR}</scaffold>', "name='2' of <scaffold> is not a name"),
        (f'<scaffold name="user">{PAIR}</scaffold>', "a scaffold cannot be named 'user'"),
        (f'<scaffold name="s" len="2">{PAIR}</scaffold>', "'len' of <scaffold> is unknown"),
        (f"{SCAFFOLD}and</scaffold>", "text 'and' in a <scaffold>, whose members must be modules"),
        (
            f"{SCAFFOLD}<union><module name='z'/></union></scaffold>",
            "<union> in a <scaffold>, whose members must be modules",
        ),
        (f"{SCAFFOLD}<user/></scaffold>", "<user> in a <scaffold>, whose members must be modules"),
        (f"{SCAFFOLD}<parameter name='p' length='1'/></scaffold>", "<parameter> in a <scaffold>"),
        (
            f'{SCAFFOLD}<module name="z"><user><module name="n"/></user></module></scaffold>',
            "<module> in a member of a <scaffold>, which holds text, parameters and roles only",
        ),
        (
            f'{SCAFFOLD}<module name="z">{SCAFFOLD}</scaffold></module></scaffold>',
            "<scaffold> in a member of a <scaffold>",
        ),
    ],
)
def test_problem_is_named_and_located_when_a_schema_breaks_a_rule(body, message):
    """Each says what is wrong, where, and what is allowed (pitfall 15)."""
    problem, *rest = problems_of(f'<schema name="s">\n  {body}</schema>')
    assert message in problem.message
    assert problem.line == 2
    assert problem.column >= 3
    assert all("in a member of a <scaffold>" in other.message for other in rest)


@pytest.mark.parametrize("tag", ["param", "parameter"])
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ('len="1"', " has no name; write <"),
        ('name="p"', " has no len"),
        ('name="1st" len="1"', "name='1st' of <"),
        ('name="p" len="1" length="1"', "has both len and length, which mean the same; remove one"),
        ('name="p" length="abc"', "has value 'abc'; allowed: a whole number of tokens from 1 to"),
        ('name="p" len=""', "has value ''"),
        ('name="p" len="0"', "has value '0'"),
        ('name="p" len="-1"', "has value '-1'"),
        ('name="p" len="1.5"', "has value '1.5'"),
        ('name="p" len="1e3"', "has value '1e3'"),
        ('name="p" len="1_000"', "has value '1_000'"),
        ('name="p" len=" 1"', "has value ' 1'"),
        ('name="p" len="\u0663"', "allowed: a whole number"),
        ('name="p" len="1000001"', "from 1 to 1,000,000"),
        (f'name="p" len="{"9" * 5_000}"', "from 1 to 1,000,000"),
        ('name="p" len="1" pad="yes"', "has value 'yes'; allowed: 'none', 'space'"),
        ('name="p" len="1" cache="true"', "attribute 'cache' of <"),
        ('name="p" len="1" default="a\tb"', "holds a tab, which XML reads as a space; write &#9;"),
        (
            'name="p" len="1" scaffold="a\nb"',
            "a line break, which XML reads as a space; write &#10;",
        ),
        ('name="p" len="1" scaffold="a\r\nb"', "a line break, which XML reads as a space"),
        ('name="schema" len="1"', "outside of all modules cannot be named 'schema'"),
        ('name="xmlns" len="1"', "a parameter cannot be named 'xmlns'"),
    ],
)
def test_problem_is_named_and_located_when_a_parameter_breaks_a_rule(tag, attributes, message):
    """Both spellings of the tag have the same attributes and limits (pitfall 15)."""
    (problem,) = problems_of(f'<schema name="s"><{tag} {attributes}/></schema>')
    assert message in problem.message
    assert problem.line == 1
    assert problem.column >= 18


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('<param name="p" len="1">x</param>', "text 'x' in a <param>, which is an empty element"),
        ('<param name="p" len="1"><user/></param>', "<user> in a <param>, which is an empty"),
        ('<module name="p" src="f">x</module>', "text 'x' in a <module> with src, which is an"),
        ('<module name="p" src="f"><user/></module>', "<user> in a <module> with src, which is an"),
    ],
)
def test_content_is_refused_when_an_element_must_be_empty(body, message, tmp_path):
    """Text in it would vanish (pitfall 12)."""
    (tmp_path / "f").write_text("file")
    with pytest.raises(SchemaError) as caught:
        pml.parse_schema(f'<schema name="s">\n{body}</schema>', src_root=tmp_path)
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.line == 2


@pytest.mark.parametrize(
    "body",
    [
        "{p}\n{p}",
        "{p}<user>\n{p}</user>",
        '<module name="m"><user>{p}</user>\n{p}</module>',
        '<scaffold name="s"><module name="a">{p}\n{p}</module><module name="b"/></scaffold>',
    ],
)
def test_parameters_are_refused_when_an_argument_could_mean_two(body):
    """Roles add no level (pitfall 15)."""
    body = body.replace("{p}", '<param name="p" len="1"/>')
    (problem,) = problems_of(f'<schema name="s">{body}</schema>')
    assert "parameter 'p' is already declared at line 1" in problem.message
    assert problem.line == 2


def test_parameters_share_a_name_when_they_lie_in_different_modules():
    """A name counts within its module; the names of tags and modules are free for parameters."""
    assert pml.parse_schema(
        '<schema name="s"><param name="p" len="1"/><module name="p"><param name="p" len="1"/>'
        '<union><module name="q"><param name="p" len="1"/><param name="schema" len="1000000"/>'
        '<param name="user" len="1"/></module></union></module></schema>'
    )


@pytest.mark.parametrize(
    "body",
    [
        '<module name="a"/>\n<module name="a"/>',
        '<union><module name="a"/>\n<module name="a"/></union>',
        '<module name="a"/>\n<union><module name="a"/></union>',
        '<system><module name="a"/></system>\n<user><module name="a"/></user>',
        '<module name="a"><module name="b"/></module>\n<module name="a.b"/>',
        '<module name="a"/>\n<scaffold name="a"><module name="b"/><module name="c"/></scaffold>',
        '<scaffold name="s"><module name="a"/>\n<module name="a"/></scaffold>',
        '<scaffold name="s"><module name="a"/>\n<module name="s"/></scaffold>',
        '<module name="b"/><scaffold name="s"><module name="a"/>\n<module name="b"/></scaffold>',
    ],
)
def test_names_are_refused_when_an_import_could_mean_two_modules(body):
    """Unions, scaffolds and roles add no level, and a path means one module (pitfall 15)."""
    (problem,) = problems_of(f'<schema name="s">{body}</schema>')
    assert "is already declared at line 1" in problem.message
    assert problem.line == 2


def test_names_repeat_when_their_modules_lie_in_different_modules():
    """A name counts within its enclosing module."""
    assert pml.parse_schema(
        '<schema name="s"><module name="a"><module name="x"/></module>'
        '<module name="b"><module name="x"/></module></schema>'
    )


def test_every_module_is_reported_when_they_nest_in_a_scaffold():
    """However deep they lie in its members, roles in between or not."""
    problems = problems_of(
        '<schema name="s"><scaffold name="x"><module name="a">\n<module name="b"><user>\n'
        '<module name="c">\n<union>\n<module name="d"/></union></module></user></module></module>'
        '<module name="e"/></scaffold></schema>'
    )
    assert [problem.line for problem in problems] == [2, 3, 4, 5]


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
        '<prompt days="1">\n<a x="\n"><user y="1">\n<b xml:lang="2"/><system xml:space="s"/>\n'
        "</user></a></prompt>",
        parse=pml.parse_prompt,
        kind=PromptError,
    )
    assert [(p.line, p.column) for p in problems] == [
        (1, 1), (2, 7), (3, 3), (4, 1), (4, 18), (4, 18),
    ]  # fmt: skip
    for problem, message in zip(
        problems,
        [
            '<prompt> has no schema; write <prompt schema="...">',
            "attribute 'x' of <a> holds a line break, which XML reads as a space; write &#10;",
            "attribute 'y' of <user> is unknown; allowed: xml:space",
            "attribute 'xml:lang' of <b> is not the name of a parameter",
            "<system> inside <user>; a turn cannot hold another turn",
            "attribute 'xml:space' of <system> has value 's'; allowed",
        ],
        strict=True,
    ):
        assert message in problem.message


@pytest.mark.parametrize("tag", ["a" * 1_001, "a." * 501, "a\u037e"])
def test_import_is_refused_when_it_cannot_be_a_path(tag):
    """Longer than any path, or no name."""
    document = f'<prompt schema="s"><{tag}/></prompt>'
    with pytest.raises((PromptError, PMLSyntaxError)):
        pml.parse_prompt(document)


def test_path_is_refused_when_it_would_be_too_long():
    """Modules within modules keep their paths; a bound keeps the schema's memory flat."""
    name = "a" * 255
    nested = "".join(f'\n<module name="{name}">' for _ in range(4)) + "</module>" * 4
    (problem,) = problems_of(f'<schema name="s">{nested}</schema>')
    assert problem.line == 5
    assert "has 1,023 characters; at most 1,000 are allowed" in problem.message


def test_messages_are_short_when_names_are_long():
    """A document of many long names does not become an error of many times its size."""
    body = f'<module name="{"x" * 100_000}" cache="{"x" * 100_000}" {"y" * 40_000}="1"/>' * 20
    problems = problems_of(f'<schema name="s">{body}<{"z" * 40_000}/></schema>')
    assert len(problems) == 61
    assert all(len(problem.message) < 400 for problem in problems)
    assert "zzz..." in problems[-1].message


def test_root_is_refused_when_it_is_no_prompt():
    """A schema is no prompt."""
    (problem,) = problems_of('<schema name="s"/>', parse=pml.parse_prompt, kind=PromptError)
    assert "expected <prompt>" in problem.message


@pytest.mark.parametrize("name", ["a", "_", "book.py", "a-b_c.9", "é", "模块", "\uff41", "a" * 255])
def test_name_is_taken_when_it_can_be_a_tag(name):
    """What is a name is a tag without a colon: a module can be imported under it."""
    assert is_name(name)
    prompt = pml.parse_prompt(f'<prompt schema="s"><{name}/></prompt>')
    assert prompt.children[0].name == name


@pytest.mark.parametrize(
    "name", ["", "1", ".a", "-a", "a b", "a:b", "²", "a²", "a\n", "a/", "😀<", "a" * 256]
)
def test_name_is_refused_when_it_cannot_be_a_tag(name):
    """No module has a name under which no prompt could import it."""
    assert not is_name(name)
