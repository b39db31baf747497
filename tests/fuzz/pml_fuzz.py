"""Fuzz target of the parser: whatever it is fed, it gives nodes or errors of ours, within bounds.

``python -m tests.fuzz.pml_fuzz --num-inputs 1000000 --seed 0`` runs a million inputs; input *n* of
a seed is always the same, and ``--first n --num-inputs 1`` runs it alone.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from pc_rag import pml
from pc_rag.errors import PMLError, PMLSyntaxError, PromptError
from pc_rag.pml import (
    Import,
    Module,
    Parameter,
    Prompt,
    RoleBlock,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
)
from pc_rag.pml.attributes import MAX_PARAMETER_LENGTH
from pc_rag.pml.names import MAX_PATH_LENGTH, RESERVED_NAMES, is_name, is_path
from tests.fuzz.pml_documents import random_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_SECONDS = 2.0
"""CPU time of one input, parsed as a schema and as a prompt."""

MAX_GROWTH_BYTES = 200_000_000
"""By how much the process may grow over a whole run."""

Parsers = tuple["Callable[[str | bytes], Schema]", "Callable[[str | bytes], Prompt]"]


class FuzzFailure(AssertionError):
    """An input that broke a promise of the parser."""


@dataclass
class Report:
    """What a run did.

    Attributes:
        num_inputs: Fed to both parsers.
        num_schemas: Accepted ones.
        num_prompts: Accepted ones.
        slowest_seconds: CPU time of the slowest input.
        slowest_input: Its number.
        growth_bytes: Growth of the process's peak memory.
        seconds: Of the whole run, generation included.
        node_kinds: Names of the nodes in what was accepted.
    """

    num_inputs: int = 0
    num_schemas: int = 0
    num_prompts: int = 0
    slowest_seconds: float = 0.0
    slowest_input: int = -1
    growth_bytes: int = 0
    seconds: float = 0.0
    node_kinds: set[str] = field(default_factory=set)

    @property
    def accepted_share(self) -> float:
        """Inputs that one of the parsers took, of all."""
        return (self.num_schemas + self.num_prompts) / max(self.num_inputs, 1)

    def __str__(self) -> str:
        return (
            f"{self.num_inputs:,} inputs in {self.seconds:,.0f} s: {self.num_schemas:,} schemas "
            f"and {self.num_prompts:,} prompts accepted ({self.accepted_share:.1%}), the others "
            f"refused; slowest {self.slowest_seconds * 1000:.0f} ms (input {self.slowest_input}); "
            f"memory grew by {self.growth_bytes / 1e6:.1f} MB; nodes accepted: "
            f"{', '.join(sorted(self.node_kinds))}"
        )


def parsers(root: Path) -> Parsers:
    """The two functions under test; files are included from ``root``."""
    return lambda document: pml.parse_schema(document, src_root=root), pml.parse_prompt


def make_root(folder: Path) -> Path:
    """Files that documents name: good ones, a link, and one that is not UTF-8."""
    (folder / "inner").mkdir()
    (folder / "a.txt").write_text("included &amp; kept\n")
    (folder / "inner" / "b.txt").write_text("é中😀")
    (folder / "empty").touch()
    (folder / "latin").write_bytes(b"\xe9")
    (folder / "link").symlink_to("a.txt")
    return folder


def fuzz(num_inputs: int, seed: int, parse: Parsers, *, first: int = 0) -> Report:
    """Feed random documents to the parsers.

    Args:
        num_inputs: How many.
        seed: Decides all inputs, together with their numbers.
        parse: For schemas and for prompts.
        first: Number of the first input.

    Raises:
        FuzzFailure: An input raised what is no error of ours, took too long, or gave malformed
            nodes; or memory grew too much.
    """
    report = Report()
    start, memory = time.monotonic(), _peak_bytes()
    for number in range(first, first + num_inputs):
        document = random_document(Random(f"{seed}:{number}"))
        try:
            _feed(document, number, parse, report)
        except Exception as error:
            raise FuzzFailure(f"input {number} of seed {seed}: {document[:2_000]!r}") from error
        report.growth_bytes = _peak_bytes() - memory
        if report.growth_bytes > MAX_GROWTH_BYTES:
            raise FuzzFailure(f"memory grew by {report.growth_bytes:,} bytes up to input {number}")
    report.seconds = time.monotonic() - start
    return report


def _feed(document: str | bytes, number: int, parse: Parsers, report: Report) -> None:
    start = time.process_time()
    schema = _parsed(parse[0], document)
    prompt = _parsed(parse[1], document)
    seconds = time.process_time() - start
    report.num_inputs += 1
    if seconds > report.slowest_seconds:
        report.slowest_seconds, report.slowest_input = seconds, number
    _require(seconds <= MAX_SECONDS, f"took {seconds:.1f} s")
    if schema is not None:
        report.num_schemas += 1
        check_schema(schema)
        report.node_kinds.update(type(node).__name__ for node in _walk(schema))
    if prompt is not None:
        report.num_prompts += 1
        check_prompt(prompt)
        report.node_kinds.update(type(node).__name__ for node in _walk(prompt))


def _parsed(parse: Callable[[str | bytes], Any], document: str | bytes) -> Any:
    try:
        return parse(document)
    except (PMLError, PromptError) as error:
        _require(bool(error.problems), "an error without problems")
        is_ordered = list(error.problems) == sorted(error.problems)
        _require(is_ordered or isinstance(error, PMLSyntaxError), "problems out of order")
        _require(all(p.line > 0 and p.message for p in error.problems), "a problem without place")
        return None


def check_schema(schema: Schema) -> None:
    """An accepted schema is well formed.

    Raises:
        FuzzFailure: It is not.
    """
    _require(is_name(schema.name), "a schema's name")
    paths: set[str] = set()
    _check_level(schema.children, "", paths, {}, in_role=False, is_cached=True)


def _check_level(
    children: tuple[Any, ...],
    path: str,
    paths: set[str],
    parameters: dict[str, Parameter],
    *,
    in_role: bool,
    is_cached: bool,
) -> None:
    for child in children:
        match child:
            case Text(text=text):
                _require(bool(text), "an empty text")
            case Parameter(name=name):
                _require(is_name(name) and name not in parameters, "a parameter's name")
                _require(1 <= child.max_tokens <= MAX_PARAMETER_LENGTH, "a parameter's length")
                parameters[name] = child
            case RoleBlock():
                _require(not in_role, "a turn in a turn")
                _check_level(
                    child.children, path, paths, parameters, in_role=True, is_cached=is_cached
                )
            case Union(members=members, scaffold=scaffold):
                names = {member.name for member in members}
                _require(bool(members) and scaffold in {None, *names}, "a union's members")
                _check_level(members, path, paths, {}, in_role=in_role, is_cached=is_cached)
            case Scaffold(members=members):
                _require(len(members) > 1 and is_cached, "a scaffold's members")
                _claim(child.name, path, paths)
                inner = (node for member in members for node in _walk(member) if node is not member)
                _require(
                    not any(isinstance(n, Module | Union | Scaffold) for n in inner), "nesting"
                )
                _check_level(members, path, paths, {}, in_role=in_role, is_cached=is_cached)
            case Module():
                _require(is_cached or not child.is_cached, "a cached module in an uncached one")
                inner_path = _claim(child.name, path, paths)
                cached = child.is_cached
                _check_level(
                    child.children, inner_path, paths, {}, in_role=in_role, is_cached=cached
                )


def _claim(name: str, path: str, paths: set[str]) -> str:
    path = f"{path}.{name}" if path else name
    _require(is_name(name) and name not in RESERVED_NAMES, "a module's name")
    _require(path not in paths and len(path) <= MAX_PATH_LENGTH, "a module's path")
    paths.add(path)
    return path


def check_prompt(prompt: Prompt) -> None:
    """An accepted prompt is well formed.

    Raises:
        FuzzFailure: It is not.
    """
    _require(is_name(prompt.schema), "a schema's name")
    for node in _walk(prompt):
        if isinstance(node, Import | Prompt):
            _require(all(map(is_name, node.arguments)), "an argument's name")
        if isinstance(node, Import):
            _require(is_path(node.name), "an import's path")
        elif isinstance(node, Text):
            _require(bool(node.text), "an empty text")
        elif isinstance(node, Turn):
            inner = (child for child in _walk(node) if child is not node)
            _require(not any(isinstance(child, Turn) for child in inner), "a turn in a turn")


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()) or getattr(node, "members", ()):
        yield from _walk(child)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise FuzzFailure(what)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Run from the command line and say what was done in one line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--num-inputs", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parse = parsers(make_root(Path(folder)))
        report = fuzz(chosen.num_inputs, chosen.seed, parse, first=chosen.first)
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
