"""Checks of source text against the rules in CONTRIBUTING.md.

Every checker takes text, so that ``tests/test_architecture.py`` can show it a bad snippet.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOMS = (
    ("errors", "types"),
    ("config",),
    ("metrics",),
    ("pml",),
    ("layout",),
    ("kv",),
    ("model",),
    ("engine",),
    ("corpus",),
    ("serving",),
    ("quality",),
    ("cli",),
)
"""Rooms by rank: a room imports itself and rooms of lower rank only."""

TYPING_ONLY = {("metrics", "kv")}
"""Pairs that break the order for annotations alone, under ``TYPE_CHECKING``."""

FRAMEWORKS = ("langchain", "langchain_", "langgraph", "langsmith", "llama_index", "haystack")
TENSOR_LIBRARIES = ("torch", "transformers")
UNPICKLERS = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
CACHE_NAMES = re.compile(
    r"(Dynamic|Static|Sliding\w*|Hybrid\w*|Quantized|Offloaded\w*|EncoderDecoder)?"
    r"Cache(Layer(Mixin)?)?|(Dynamic|Static|Sliding\w*|Quantized)(Sliding\w*)?Layer"
)
"""Names of transformers' cache classes and of their layers, when imported from transformers."""

UNMISTAKABLE_CACHE_NAMES = re.compile(r"(Dynamic|Static|Quantized|EncoderDecoder)Cache")
"""Those that can mean nothing else, wherever they stand."""

IMPORT_FUNCTIONS = ("importlib.import_module", "import_module", "__import__", "require")
"""Calls that import the module their first argument names."""

# The parts are split so that this file does not break the rule it checks.
ABSOLUTE_PATH = re.compile(
    r"(?:(?<![\w./~-])|(?<=file://))/(?:ho[m]e|Us[e]rs|ro[o]t|wo[r]k(?:space|dir)?)(?:/[\w.-]|$)|[A-Z]:\\Us[e]rs"
)
REGISTRY_HOST = re.compile(
    r"\b(?:[\w-]+\.)*(?:py[p]i|python[h]osted|npm[j]s|artifac[t]ory|dev[p]i)(?:\.[\w-]+)*"
    r"\.(?:org|com|io|net|dev|local|internal)\b"
    r"|\bdownload\.py[t]orch\.org|\b(?:gh[c]r|qu[a]y|docker)\.i[o]\b"
    r"|https?://[^\s/]+/(?:sim[p]le|py[p]i)\b|--(?:extra-)?index-[u]rl"
)


@dataclass(frozen=True, slots=True, order=True)
class Breach:
    """A line that breaks a rule."""

    line: int
    what: str


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a source imports.

    Attributes:
        module: Dotted name; names of ``from a import b`` are joined to it (``a.b``).
        line: 1-based line.
        is_typing_only: Whether it stands under ``if TYPE_CHECKING``.
    """

    module: str
    line: int
    is_typing_only: bool


def imports(source: str, *, package: str = "") -> list[Import]:
    """Every import in ``source``, in functions too.

    Args:
        source: Python text.
        package: Dotted package that relative imports start from.
    """
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return [
        Import(module, getattr(node, "lineno", 0), id(node) in typing_only)
        for node in ast.walk(tree)
        for module in _imported(node, package)
    ]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in IMPORT_FUNCTIONS:
        name = node.args[0]
        if isinstance(name, ast.Constant):
            yield str(name.value)


def _is_of(module: str, roots: tuple[str, ...]) -> bool:
    top = module.partition(".")[0]
    return any(top == root or (root.endswith("_") and top.startswith(root)) for root in roots)


def import_order_breaches(source: str, room: str, package: str) -> list[Breach]:
    """Imports of a room that stands at the same rank or higher, or of no known room.

    Args:
        source: Text of a file of ``room``.
        room: First name below ``pc_rag``.
        package: Dotted package that the file lies in.
    """
    ranks = {name: rank for rank, names in enumerate(ROOMS) for name in names}
    if room not in ranks:
        return [Breach(0, f"room {room} has no rank: give it its place in ROOMS")]
    breaches = []
    for each in imports(source, package=package):
        if each.module.partition(".")[0] != "pc_rag":
            continue
        target = each.module.split(".")[1] if "." in each.module else ""
        if target == room or ranks.get(target, len(ROOMS)) < ranks[room]:
            continue
        if each.is_typing_only and (room, target) in TYPING_ONLY:
            continue
        if room == "cli" and target in {"", "__version__"}:
            continue
        breaches.append(Breach(each.line, f"{room} imports {each.module}"))
    return breaches


def forbidden_imports(source: str, roots: tuple[str, ...]) -> list[Breach]:
    """Imports of the packages ``roots`` (a root that ends in ``_`` stands for all it begins)."""
    return [
        Breach(each.line, f"imports {each.module}")
        for each in imports(source)
        if _is_of(each.module, roots)
    ]


def assert_breaches(source: str) -> list[Breach]:
    """Every ``assert`` statement: ``python -O`` drops them."""
    return [
        Breach(node.lineno, "assert statement")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert)
    ]


def print_breaches(source: str) -> list[Breach]:
    """Every use of the built-in ``print``."""
    return [
        Breach(node.lineno, "print")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and node.id == "print"
    ]


def code_execution_breaches(source: str) -> list[Breach]:
    """Whatever runs code out of data: unpickling, ``torch.load``, ``eval``, ``exec``."""
    breaches = forbidden_imports(source, UNPICKLERS)
    for each in imports(source):
        if each.module in {"torch.load", "builtins.eval", "builtins.exec"}:
            breaches.append(Breach(each.line, f"imports {each.module}"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in {"eval", "exec"}:
            breaches.append(Breach(node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {
            "torch.load",
            "torch.serialization.load",
            "builtins.eval",
            "builtins.exec",
        }:
            breaches.append(Breach(node.lineno, ast.unparse(node)))
        elif (
            isinstance(node, ast.keyword)
            and node.arg in {"allow_pickle", "trust_remote_code"}
            and ast.unparse(node.value) != "False"
        ):
            breaches.append(Breach(node.value.lineno, f"{node.arg}, not False"))
    return breaches


def cache_class_breaches(source: str) -> list[Breach]:
    """Mentions of transformers' ``Cache`` classes, by import or by name."""
    breaches = [
        Breach(each.line, f"imports {each.module}")
        for each in imports(source)
        if _is_of(each.module, ("transformers",))
        and any(
            part == "cache_utils" or CACHE_NAMES.fullmatch(part) for part in each.module.split(".")
        )
    ]
    for node in ast.walk(ast.parse(source)):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        if isinstance(node, (ast.Name, ast.Attribute)) and UNMISTAKABLE_CACHE_NAMES.fullmatch(name):
            breaches.append(Breach(node.lineno, name))
    return breaches


def private_text_breaches(text: str) -> list[Breach]:
    """Absolute paths of somebody's machine, and host names of package registries."""
    return [
        Breach(number, match[0])
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in (ABSOLUTE_PATH, REGISTRY_HOST)
        for match in pattern.finditer(line)
    ]
