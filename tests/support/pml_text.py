"""What a prompt says with its schema, by walking their nodes: no tokens, no layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.pml import Import, Module, Parameter, RoleBlock, Text, Union

if TYPE_CHECKING:
    from pc_rag.pml import Prompt, Schema


def prompt_text(schema: Schema, prompt: Prompt) -> str:
    """The text of a prompt that holds imports and arguments only.

    Fails where an import or an argument has no place in the schema, where an argument is missing,
    and where imports do not stand in the order of the schema or two are of one union.
    """
    assert prompt.schema == schema.name
    return _said(schema.children, prompt.children, prompt.arguments)


def _said(children, imports, arguments) -> str:
    assert all(isinstance(each, Import) for each in imports)
    waiting = list(imports)
    parameters: list[str] = []
    text = _walk(children, waiting, arguments, parameters)
    assert not waiting, f"imports of nothing, or out of order: {waiting}"
    assert sorted(parameters) == sorted(arguments)
    return text


def _walk(children, waiting, arguments, parameters) -> str:
    texts = []
    for child in children:
        match child:
            case Text(text=text):
                texts.append(text)
            case Parameter(name=name):
                parameters.append(name)
                texts.append(arguments[name])
            case RoleBlock(children=inner):
                texts.append(_walk(inner, waiting, arguments, parameters))
            case Module() | Union():
                members = child.members if isinstance(child, Union) else (child,)
                found = next((m for m in members if waiting and m.name == waiting[0].name), None)
                if found is not None:
                    node = waiting.pop(0)
                    texts.append(_said(found.children, node.children, node.arguments))
            case _:
                raise AssertionError(f"a program makes no {child}")
    return "".join(texts)
