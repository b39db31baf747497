"""Random schemas with prompts that fit them, and their XML."""

from __future__ import annotations

from xml.sax.saxutils import escape

from hypothesis import strategies as st

from pc_rag.pml import Import, Module, Prompt, RoleBlock, Schema, Text, Union
from pc_rag.types import CHAT_ROLES

SCHEMA_LETTERS = "abc"
PROMPT_LETTERS = "XYZ"


def _texts(letters: str) -> st.SearchStrategy[Text]:
    return st.builds(Text, st.text(letters, min_size=1, max_size=6))


@st.composite
def schemas(draw: st.DrawFn, max_depth: int = 3) -> Schema:
    """A schema with unique module names, no two texts side by side, and sometimes roles."""
    counter = iter(range(1000))

    def module(depth: int, *, may_speak: bool) -> Module:
        return Module(f"m{next(counter)}", children(depth + 1, may_speak=may_speak))

    def children(depth: int, *, may_speak: bool) -> tuple:
        kinds = ["text"]
        if depth < max_depth:
            kinds += ["module", "union"]
        if may_speak:
            kinds.append("role")
        found: list = []
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=4)):
            if kind == "text":
                if not (found and isinstance(found[-1], Text)):
                    found.append(draw(_texts(SCHEMA_LETTERS)))
            elif kind == "module":
                found.append(module(depth, may_speak=may_speak))
            elif kind == "union":
                num_members = draw(st.integers(1, 3))
                members = [module(depth, may_speak=may_speak) for _ in range(num_members)]
                found.append(Union(tuple(members)))
            else:
                role = draw(st.sampled_from(sorted(CHAT_ROLES)))
                found.append(RoleBlock(role, children(depth, may_speak=False)))
        return tuple(found)

    return Schema("s", children(0, may_speak=draw(st.booleans())))


@st.composite
def schemas_with_prompts(draw: st.DrawFn) -> tuple[Schema, Prompt]:
    """A schema and a prompt that imports some of it, with at least one text."""
    schema = draw(schemas())

    def flat(nodes: tuple) -> list:
        found: list = []
        for node in nodes:
            found += flat(node.children) if isinstance(node, RoleBlock) else [node]
        return found

    def imports(nodes: tuple) -> tuple:
        found: list = []
        for node in flat(nodes):
            module = draw(st.sampled_from(node.members)) if isinstance(node, Union) else node
            if isinstance(module, Module) and draw(st.booleans()):
                if draw(st.booleans()):
                    found.append(draw(_texts(PROMPT_LETTERS)))
                found.append(Import(module.name, imports(module.children)))
        if draw(st.booleans()):
            found.append(draw(_texts(PROMPT_LETTERS)))
        return tuple(found)

    children = imports(schema.children)
    if not (children and isinstance(children[-1], Text)):
        children = (*children, draw(_texts(PROMPT_LETTERS)))
    return schema, Prompt("s", children)


def to_xml(node: object) -> str:
    """The XML of a node, all whitespace preserved."""
    match node:
        case Text(text=text):
            return escape(text, {"\r": "&#13;"})
        case Union(members=members):
            tag, attributes, children = "union", "", members
        case Schema(name=name, children=children):
            tag, attributes = "schema", f' name="{name}" xml:space="preserve"'
        case Prompt(schema=name, children=children):
            tag, attributes = "prompt", f' schema="{name}" xml:space="preserve"'
        case Module(name=name, children=children):
            tag, attributes = "module", f' name="{name}"'
        case RoleBlock(role=role, children=children):
            tag, attributes = str(role), ""
        case Import(name=name, children=children):
            tag, attributes = name, ""
    return f"<{tag}{attributes}>{''.join(map(to_xml, children))}</{tag}>"
