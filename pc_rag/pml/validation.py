"""The rules of PML over elements; every problem of a document is found, not the first one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pc_rag.pml.attributes import argument_problems, attribute_problems, problem_at
from pc_rag.pml.included import IncludeError
from pc_rag.pml.names import (
    MAX_NAME_LENGTH,
    MAX_PATH_LENGTH,
    NAME_RULE,
    PARAMETER_TAGS,
    RESERVED_NAMES,
    SCHEMA_TAGS,
    is_name,
    is_path,
    shorten,
)
from pc_rag.pml.nodes import Text
from pc_rag.pml.whitespace import is_blank
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.errors import Problem
    from pc_rag.pml.included import IncludedFiles
    from pc_rag.pml.nodes import Location
    from pc_rag.pml.tree import Element

_GROUPS = ("union", "scaffold")
"""Tags that hold modules and nothing else."""

_MIN_SCAFFOLD_MEMBERS = 2
_NUM_MEMBERS_SHOWN = 10


def schema_problems(root: Element, files: IncludedFiles) -> tuple[Problem, ...]:
    """Everything that keeps an element from being a schema, in document order.

    Args:
        root: Of the document.
        files: What its modules may include; those it does include are read.
    """
    if root.tag != "schema":
        return (problem_at(root.location, _wrong_root(root.tag, "schema")),)
    checker = _SchemaChecker(files)
    return tuple(sorted((*attribute_problems(root), *checker.content(root, _Scope(tag="schema")))))


def prompt_problems(root: Element) -> tuple[Problem, ...]:
    """Everything that keeps an element from being a prompt, in document order."""
    if root.tag != "prompt":
        return (problem_at(root.location, _wrong_root(root.tag, "prompt")),)
    problems = list(argument_problems(root))
    for child in root.children:
        problems += _prompt_child_problems(child, role="")
    return tuple(sorted(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """What the elements around an element decide about it.

    Attributes:
        tag: Of the element directly around.
        path: Dotted path of the nearest enclosing module; empty in none.
        parameters: Those of that module, or of the schema, which its elements add to.
        role: Tag of the enclosing role block; empty in none.
        is_cached: No module around has ``cache="false"``.
        is_in_scaffold: It lies in a member of a scaffold.
    """

    tag: str
    path: str = ""
    parameters: dict[str, Location] = field(default_factory=dict)
    role: str = ""
    is_cached: bool = True
    is_in_scaffold: bool = False


class _SchemaChecker:
    """Carries what all of a schema must agree on: the paths of modules and scaffolds."""

    def __init__(self, files: IncludedFiles) -> None:
        self._files = files
        self._paths: dict[str, Location] = {}

    def content(self, element: Element, scope: _Scope) -> Iterator[Problem]:
        """Problems of the children of an element and of all below.

        Args:
            element: Its own attributes have been checked.
            scope: Of its children.
        """
        for child in element.children:
            if not isinstance(child, Text):
                yield from self._element(child, scope)

    def _element(self, element: Element, scope: _Scope) -> Iterator[Problem]:
        tag = element.tag
        if tag not in SCHEMA_TAGS:
            yield problem_at(element.location, _unknown_tag(tag))
            yield from self.content(element, replace(scope, tag=tag))
            return
        yield from _place_problems(element, scope)
        yield from attribute_problems(element)
        if tag in PARAMETER_TAGS:
            yield from _parameter_problems(element, scope)
        elif tag == "module":
            yield from self._module_problems(element, scope)
        else:
            if tag == "union":
                yield from _union_problems(element)
            elif tag == "scaffold":
                yield from self._scaffold_problems(element, scope)
            else:
                scope = replace(scope, role=tag)
            yield from self.content(element, replace(scope, tag=tag))

    def _module_problems(self, element: Element, scope: _Scope) -> Iterator[Problem]:
        yield from self._path_problems(element, scope)
        yield from _cache_problems(element, scope)
        src = element.attributes.get("src")
        if src is not None:
            yield from self._included_problems(element, src)
            return
        yield from self.content(
            element,
            replace(
                scope,
                tag="module",
                path=_path(element, scope),
                parameters={},
                is_cached=scope.is_cached and element.attributes.get("cache") != "false",
                is_in_scaffold=scope.is_in_scaffold or scope.tag == "scaffold",
            ),
        )

    def _scaffold_problems(self, element: Element, scope: _Scope) -> Iterator[Problem]:
        yield from self._path_problems(element, scope)
        yield from _group_text_problems(element)
        num_members = sum(not isinstance(child, Text) for child in element.children)
        if num_members < _MIN_SCAFFOLD_MEMBERS:
            yield problem_at(
                element.location,
                f"a <scaffold> has {num_members} of at least {_MIN_SCAFFOLD_MEMBERS} members; a "
                "module alone needs none: put more modules in, or take the <scaffold> away",
            )
        if not scope.is_cached:
            yield problem_at(
                element.location,
                'a <scaffold> in a module with cache="false", of which nothing is stored; take '
                "the <scaffold> away, or cache the module",
            )

    def _path_problems(self, element: Element, scope: _Scope) -> Iterator[Problem]:
        name = element.attributes.get("name", "")
        if not is_name(name):
            return
        if name in RESERVED_NAMES:
            yield problem_at(
                element.location,
                f"a {element.tag} cannot be named {name!r}, which is a tag of PML; choose another "
                "name",
            )
        path = _path(element, scope)
        if len(path) > MAX_PATH_LENGTH:
            yield problem_at(
                element.location,
                f"the path of {element.tag} {shorten(name)!r} has {len(path):,} characters; at "
                f"most {MAX_PATH_LENGTH:,} are allowed: shorten the names around it",
            )
            return
        first = self._paths.setdefault(path, element.location)
        if first is not element.location:
            yield problem_at(
                element.location,
                f"{element.tag} {shorten(path)!r} is already declared at {_place(first)}; names "
                "of modules and scaffolds must differ within one enclosing module, unions, "
                "scaffolds and roles included",
            )

    def _included_problems(self, element: Element, src: str) -> Iterator[Problem]:
        yield from _emptiness_problems(element, " with src")
        if "src" in element.broken_values:
            return
        try:
            self._files.text(src)
        except IncludeError as error:
            yield problem_at(element.location, f"src={shorten(src)!r} of <module> {error}")


def _path(element: Element, scope: _Scope) -> str:
    """Path of a module or scaffold; that of the module around where it has no valid name."""
    name = element.attributes.get("name", "")
    if not is_name(name):
        return scope.path
    return f"{scope.path}.{name}" if scope.path else name


def _place_problems(element: Element, scope: _Scope) -> Iterator[Problem]:
    """Problems of where a tag stands."""
    tag = element.tag
    if scope.tag in _GROUPS and tag != "module":
        yield problem_at(
            element.location,
            f"<{tag}> in a <{scope.tag}>, whose members must be modules; put it into a <module>, "
            f"or out of the {scope.tag}",
        )
    if scope.is_in_scaffold and tag in ("module", *_GROUPS):
        yield problem_at(
            element.location,
            f"<{tag}> in a member of a <scaffold>, which holds text, parameters and roles only: "
            "what it says must be the same in every prompt; put it out of the scaffold",
        )
    if scope.role and tag in CHAT_ROLES:
        yield problem_at(element.location, _turn_in_turn(tag, scope.role))


def _parameter_problems(element: Element, scope: _Scope) -> Iterator[Problem]:
    yield from _emptiness_problems(element)
    name = element.attributes.get("name", "")
    if not is_name(name):
        return
    if name == "xmlns" or (name == "schema" and not scope.path):
        yield problem_at(
            element.location,
            f"a parameter {'' if name == 'xmlns' else 'outside of all modules '}cannot be named "
            f"{name!r}, which means something else as an attribute; choose another name",
        )
    first = scope.parameters.setdefault(name, element.location)
    if first is not element.location:
        yield problem_at(
            element.location,
            f"parameter {shorten(name)!r} is already declared at {_place(first)}; names of "
            "parameters must differ within one enclosing module, roles included",
        )


def _cache_problems(element: Element, scope: _Scope) -> Iterator[Problem]:
    cache = element.attributes.get("cache")
    if cache == "true" and not scope.is_cached:
        yield problem_at(
            element.location,
            'cache="true" in a module with cache="false", of which nothing is stored; remove one '
            "of them",
        )
    if cache == "false" and scope.tag == "scaffold":
        yield problem_at(
            element.location,
            'cache="false" on a member of a <scaffold>, which is stored together with the others; '
            "remove it, or put the module out of the scaffold",
        )


def _union_problems(element: Element) -> Iterator[Problem]:
    yield from _group_text_problems(element)
    members = [child for child in element.children if not isinstance(child, Text)]
    if not members:
        yield problem_at(element.location, "a <union> has no member; give it at least one <module>")
    scaffold = element.attributes.get("scaffold")
    names = [member.attributes.get("name", "") for member in members if member.tag == "module"]
    if scaffold is not None and scaffold not in names and "scaffold" not in element.broken_values:
        shown = ", ".join(shorten(name) for name in names[:_NUM_MEMBERS_SHOWN])
        more = ", ..." if len(names) > _NUM_MEMBERS_SHOWN else ""
        yield problem_at(
            element.location,
            f"scaffold={shorten(scaffold)!r} of <union> names no member of it; it has "
            f"{shown or 'none'}{more}",
        )


def _group_text_problems(element: Element) -> Iterator[Problem]:
    for child in element.children:
        if isinstance(child, Text) and not is_blank(child.text):
            yield problem_at(
                child.location,
                f"text {_excerpt(child)!r} in a <{element.tag}>, whose members must be modules; "
                "put it into a <module>",
            )


def _emptiness_problems(element: Element, why: str = "") -> Iterator[Problem]:
    if element.children:
        child = element.children[0]
        what = f"text {_excerpt(child)!r}" if isinstance(child, Text) else f"<{shorten(child.tag)}>"
        yield problem_at(
            child.location,
            f"{what} in a <{element.tag}>{why}, which is an empty element; put it behind the tag",
        )


def _prompt_child_problems(child: Element | Text, *, role: str) -> Iterator[Problem]:
    if isinstance(child, Text):
        return
    if child.tag in CHAT_ROLES:
        yield from attribute_problems(child)
        if role:
            yield problem_at(child.location, _turn_in_turn(child.tag, role))
        role = child.tag
    else:
        yield from argument_problems(child)
        if not is_path(child.tag):
            yield problem_at(
                child.location,
                f"<{shorten(child.tag)}> is not the name or path of a module; {NAME_RULE}, and a "
                f"path has {MAX_PATH_LENGTH:,} at most",
            )
    for grandchild in child.children:
        yield from _prompt_child_problems(grandchild, role=role)


def _turn_in_turn(tag: str, role: str) -> str:
    return f"<{tag}> inside <{role}>; a turn cannot hold another turn: close </{role}> first"


def _wrong_root(tag: str, expected: str) -> str:
    return f"the root element is <{shorten(tag)}>; expected <{expected}>"


def _unknown_tag(tag: str) -> str:
    close = get_close_matches(tag, SCHEMA_TAGS, n=1) if len(tag) <= MAX_NAME_LENGTH else []
    hint = f"; did you mean <{close[0]}>?" if close else ""
    allowed = ", ".join(f"<{known}>" for known in SCHEMA_TAGS)
    return f"unknown tag <{shorten(tag)}>; allowed: {allowed}{hint}"


def _excerpt(text: Text) -> str:
    return shorten(" ".join(text.text[:200].split()), 30)


def _place(location: Location) -> str:
    return f"line {location.line}, column {location.column}"
