"""Why a statement has no PML, and what to write instead."""

from __future__ import annotations

import ast

from pc_rag.pml.program.definition import RefusedError

_INSTEAD: dict[type[ast.stmt], tuple[str, str]] = {
    ast.While: ("a while loop", "write a for loop over constants"),
    ast.AsyncFor: ("an async loop", "write a for loop over constants"),
    ast.Try: ("try", "handle errors before the call"),
    ast.With: ("with", "read what it opens before the call, and pass it as a parameter"),
    ast.AsyncWith: ("async with", "read what it opens before the call, and pass it as a parameter"),
    ast.FunctionDef: ("a function inside of a program", "define it outside, with @program"),
    ast.AsyncFunctionDef: ("an async function", "define a plain one outside, with @program"),
    ast.ClassDef: ("a class inside of a program", "define it outside"),
    ast.Return: ("an early return", "put the rest into else, and end with one return"),
    ast.Global: ("global", "pass the value as a parameter"),
    ast.Nonlocal: ("nonlocal", "pass the value as a parameter"),
    ast.Import: ("an import", "import outside of the program"),
    ast.ImportFrom: ("an import", "import outside of the program"),
    ast.Delete: ("del", "leave the name alone"),
    ast.Raise: ("raise", "check arguments before the call"),
    ast.Assert: ("assert", "check arguments before the call"),
    ast.Break: ("break", "loop over the constants that are wanted only"),
    ast.Continue: ("continue", "put the rest of the loop into an if"),
    ast.Assign: ("an assignment", "pass the value as a parameter, or make it a constant outside"),
    ast.AnnAssign: (
        "an assignment",
        "pass the value as a parameter, or make it a constant outside",
    ),
    ast.AugAssign: (
        "an assignment",
        "pass the value as a parameter, or make it a constant outside",
    ),
}


def refusal(node: ast.stmt, text_name: str | None) -> RefusedError:
    """Why a statement cannot be compiled.

    Args:
        node: The statement.
        text_name: Of the variable that the function builds its text in, if it does.
    """
    if text_name is not None and isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(each, ast.Name) and each.id == text_name for each in targets):
            return RefusedError(
                node, f"{text_name!r} is given another value; only add to it: {text_name} += ..."
            )
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Yield):
            return RefusedError(node, "a yield without text; yield text, or write pass")
        return RefusedError(
            node, f"{ast.unparse(node.value)} is computed and dropped; yield it, or take it out"
        )
    what, instead = _INSTEAD.get(type(node), (type(node).__name__, "do it before the call"))
    return RefusedError(node, f"{what} is not compiled; {instead}")
