"""``pc-rag pml``: look at PML files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pc_rag.cli import options
from pc_rag.cli.edge import ExitCode
from pc_rag.cli.output import err, out, print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.layout import LayoutRow

pml = typer.Typer(no_args_is_help=True, help="Check schemas and prompts, and see their layout.")

Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="PML files.")]
SrcRoot = Annotated[
    Path | None,
    typer.Option(
        "--src-root",
        metavar="DIR",
        help="Folder below which src attributes name files. [default: none; src is refused]",
    ),
]


@pml.command()
def check(files: Files, src_root: SrcRoot = None, as_json: options.AsJson = False) -> None:
    """Check schemas and prompts; every problem is listed with its line and column.

    Exits with 1 where a file has one.
    """
    from pc_rag.errors import PMLError, PromptError

    results = []
    for path in files:
        try:
            result = _parse(path, src_root)
        except (PMLError, PromptError) as error:
            result = {"file": str(path), "problems": [asdict(each) for each in error.problems]}
            if not as_json:
                say(str(error), style="red")
        else:
            if not as_json:
                out.print(f"{path}: {result['kind']} {result['name']}: no problems", soft_wrap=True)
        results.append(result)
    if as_json:
        print_json({"files": results})
    if any(result["problems"] for result in results):
        raise typer.Exit(ExitCode.REFUSED)


@pml.command()
def layout(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A schema.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME", help="Model whose tokenizer counts; no weights are loaded."
        ),
    ] = "smollm2",
    src_root: SrcRoot = None,
    as_json: options.AsJson = False,
) -> None:
    """Show where a schema's modules lie: spans of position IDs, reserved ones, tokens stored."""
    from pc_rag.pml import read_schema

    schema = read_schema(file, src_root=src_root)
    from pc_rag.config import EngineConfig
    from pc_rag.layout import lay_out, layout_rows
    from pc_rag.model.loading import load_tokenizer
    from pc_rag.model.template_encoder import TemplateEncoder

    with err.status(f"loading the tokenizer of {model}"):
        encoder = TemplateEncoder(load_tokenizer(model))
    rows = layout_rows(lay_out(schema, encoder, visibility=EngineConfig.load().visibility))
    if as_json:
        print_json({"file": str(file), "rows": [asdict(row) for row in rows]})
    else:
        out.print(_layout_table(rows))


def _parse(path: Path, src_root: Path | None) -> dict[str, Any]:
    """Kind and name of a valid file, with no problems."""
    from pc_rag.errors import PMLError
    from pc_rag.pml import parse_prompt, parse_schema
    from pc_rag.pml.tree import read_tree

    try:
        document = path.read_bytes()
    except OSError as error:
        raise PMLError(f"cannot be read: {error.strerror or error}", str(path)) from error
    source = str(path)
    if read_tree(document, source).tag == "prompt":
        return _result(path, "prompt", parse_prompt(document, source=source).schema)
    schema = parse_schema(document, source=source, src_root=src_root)
    return _result(path, "schema", schema.name)


def _result(path: Path, kind: str, name: str) -> dict[str, Any]:
    return {"file": str(path), "kind": kind, "name": name, "problems": []}


def _layout_table(rows: Sequence[LayoutRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("node")
    for column in ("span", "reserved", "tokens", "entries"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{'  ' * row.depth}{row.kind} {row.name}".rstrip(),
            f"[{row.span.start}, {row.span.end})",
            f"{row.num_reserved}",
            f"{row.num_tokens}",
            f"{row.num_entries}",
        )
    return table
