"""Random schemas with prompts that fit them, and their XML."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from hypothesis import strategies as st

from pc_rag.pml import Import, Module, Prompt, RoleBlock, Schema, Text, Union
from pc_rag.pml.nodes import Parameter, Scaffold, Turn
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_LETTERS = "abc"
PROMPT_LETTERS = "XYZ"
SCAFFOLD_LETTERS = "uvw"
DEFAULT_LETTERS = "def"
ARGUMENT_LETTERS = "PQR"

_ROLES = st.sampled_from(sorted(CHAT_ROLES))


def _texts(letters: str) -> st.SearchStrategy[Text]:
    return st.builds(Text, st.text(letters, min_size=1, max_size=6))


def _parameters(name: str, max_tokens: int) -> st.SearchStrategy[Parameter]:
    def fitting(letters: str) -> st.SearchStrategy[str | None]:
        return st.none() | st.text(letters, max_size=max_tokens)

    return st.builds(
        Parameter,
        name=st.just(name),
        max_tokens=st.just(max_tokens),
        scaffold=fitting(SCAFFOLD_LETTERS),
        default=fitting(DEFAULT_LETTERS),
        pads_with_space=st.booleans(),
    )


class _SchemaMaker:
    """Draws the nodes of one schema; every name is unique in it."""

    def __init__(self, draw: st.DrawFn, max_depth: int) -> None:
        self._draw = draw
        self._max_depth = max_depth
        self._numbers = iter(range(1000))

    def children(
        self, depth: int, *, may_speak: bool, has_modules: bool = True, is_cached: bool = True
    ) -> tuple:
        kinds = ["text", "parameter"]
        if depth < self._max_depth and has_modules:
            kinds += ["module", "union", *(["scaffold"] if is_cached else [])]
        if may_speak:
            kinds.append("role")
        found: list = []
        for kind in self._draw(st.lists(st.sampled_from(kinds), max_size=3 if depth else 4)):
            match kind:
                case "text":
                    if not (found and isinstance(found[-1], Text)):
                        found.append(self._draw(_texts(SCHEMA_LETTERS)))
                case "parameter":
                    length = self._draw(st.integers(1, 6))
                    found.append(self._draw(_parameters(f"p{next(self._numbers)}", length)))
                case "role":
                    inside = self.children(
                        depth, may_speak=False, has_modules=has_modules, is_cached=is_cached
                    )
                    found.append(RoleBlock(self._draw(_ROLES), inside))
                case _:
                    found.append(self._modules(kind, depth, may_speak, is_cached))
        return tuple(found)

    def _modules(self, kind: str, depth: int, may_speak: bool, is_cached: bool) -> object:
        def module(*, has_modules: bool) -> Module:
            name = f"m{next(self._numbers)}"
            stays = is_cached and (not has_modules or self._draw(st.integers(0, 3)) > 0)
            inside = self.children(
                depth + 1, may_speak=may_speak, has_modules=has_modules, is_cached=stays
            )
            return Module(name, inside, is_cached=stays)

        if kind == "module":
            return module(has_modules=True)
        if kind == "union":
            members = [module(has_modules=True) for _ in range(self._draw(st.integers(1, 3)))]
            names = st.sampled_from([member.name for member in members])
            return Union(tuple(members), scaffold=self._draw(st.none() | names))
        members = [module(has_modules=False) for _ in range(self._draw(st.integers(2, 3)))]
        return Scaffold(f"k{next(self._numbers)}", tuple(members))


@st.composite
def schemas(draw: st.DrawFn, max_depth: int = 3) -> Schema:
    """A schema with unique names, no two texts side by side, and sometimes roles."""
    maker = _SchemaMaker(draw, max_depth)
    return Schema("s", maker.children(0, may_speak=draw(st.booleans())))


def parameters_of(nodes: tuple) -> list[Parameter]:
    """The parameters that lie directly in a module or schema."""
    return [node for node in flat(nodes) if isinstance(node, Parameter)]


def flat(nodes: tuple) -> list:
    """Nodes with those of role blocks in the place of the blocks."""
    found: list = []
    for node in nodes:
        found += flat(node.children) if isinstance(node, RoleBlock) else [node]
    return found


def has_roles(nodes: tuple) -> bool:
    """Whether a schema has a role block at any depth."""
    return any(
        isinstance(node, RoleBlock)
        or has_roles(getattr(node, "children", ()) + getattr(node, "members", ()))
        for node in nodes
    )


class _PromptMaker:
    """Draws a prompt that fits a schema."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def arguments(self, nodes: tuple) -> dict[str, str]:
        found = {}
        for parameter in parameters_of(nodes):
            if parameter.default is None or self._draw(st.booleans()):
                text = st.text(ARGUMENT_LETTERS, max_size=parameter.max_tokens)
                found[parameter.name] = self._draw(text)
        return found

    def imports(self, nodes: tuple) -> tuple:
        found: list = []
        for node in flat(nodes):
            if isinstance(node, Scaffold):
                found += self._scaffold(node)
            elif isinstance(node, Module | Union):
                is_union = isinstance(node, Union)
                module = self._draw(st.sampled_from(node.members)) if is_union else node
                found += self._module(module, is_needed=False)
        return (*found, *self._maybe_text())

    def _scaffold(self, node: Scaffold) -> list:
        if self._draw(st.booleans()):
            return [each for m in node.members for each in self._module(m, is_needed=False)]
        inside: list = []
        for member in node.members:
            needs = any(p.default is None for p in parameters_of(member.children))
            inside += self._module(member, is_needed=needs)
        return [*self._maybe_text(), Import(node.name, (*inside, *self._maybe_text()))]

    def _module(self, module: Module, *, is_needed: bool) -> list:
        if not (is_needed or self._draw(st.booleans())):
            return []
        arguments = self.arguments(module.children)
        node = Import(module.name, self.imports(module.children), arguments=arguments)
        return [*self._maybe_text(), node]

    def _maybe_text(self) -> list:
        return [self._draw(_texts(PROMPT_LETTERS))] if self._draw(st.booleans()) else []


@st.composite
def schemas_with_prompts(draw: st.DrawFn) -> tuple[Schema, Prompt]:
    """A schema and a prompt that imports some of it, with at least one text.

    Where the schema has no roles, the prompt sometimes has turns.
    """
    schema = draw(schemas())
    maker = _PromptMaker(draw)
    children = maker.imports(schema.children)
    if not (children and isinstance(children[-1], Text)):
        children = (*children, draw(_texts(PROMPT_LETTERS)))
    if not has_roles(schema.children) and draw(st.booleans()):
        first, last = sorted(draw(st.tuples(*2 * [st.integers(0, len(children))])))
        turn = Turn(draw(_ROLES), children[first:last])
        children = (*children[:first], *([turn] if first < last else []), *children[last:])
    return schema, Prompt("s", children, arguments=maker.arguments(schema.children))


def with_paths(node: object) -> object:
    """The same prompt, with dotted paths where an import holds nothing but one other."""
    match node:
        case Import(name=name, children=(Import() as inner,)) if (
            not node.arguments and not name.startswith("k")
        ):
            inner = with_paths(inner)
            return replace(inner, name=f"{name}.{inner.name}")
        case Import() | Turn() | Prompt():
            return replace(node, children=tuple(map(with_paths, node.children)))
    return node


def to_xml(node: object) -> str:
    """The XML of a node, all whitespace preserved."""
    attributes: dict[str, str | None] = {}
    children: tuple = ()
    match node:
        case Text(text=text):
            return escape(text, {"\r": "&#13;"})
        case Union(members=children, scaffold=scaffold):
            tag, attributes = "union", {"scaffold": scaffold}
        case Scaffold(name=name, members=children):
            tag, attributes = "scaffold", {"name": name}
        case Schema(name=name, children=children):
            tag, attributes = "schema", {"name": name, "xml:space": "preserve"}
        case Prompt(schema=name, children=children, arguments=arguments):
            tag, attributes = "prompt", {"schema": name, "xml:space": "preserve", **arguments}
        case Module(name=name, children=children, is_cached=is_cached):
            tag, attributes = "module", {"name": name, "cache": None if is_cached else "false"}
        case RoleBlock(role=role, children=children) | Turn(role=role, children=children):
            tag = str(role)
        case Import(name=tag, children=children, arguments=attributes):
            pass
        case Parameter():
            tag, attributes = "parameter", _parameter_attributes(node)
    inside = "".join(map(to_xml, children))
    return f"<{tag}{_written(attributes)}>{inside}</{tag}>"


def _parameter_attributes(parameter: Parameter) -> dict[str, str | None]:
    return {
        "name": parameter.name,
        "length": str(parameter.max_tokens),
        "scaffold": parameter.scaffold,
        "default": parameter.default,
        "pad": "space" if parameter.pads_with_space else None,
    }


def _written(attributes: Mapping[str, str | None]) -> str:
    entities = {"\n": "&#10;", "\t": "&#9;", "\r": "&#13;"}
    return "".join(
        f" {name}={quoteattr(value, entities)}"
        for name, value in attributes.items()
        if value is not None
    )
