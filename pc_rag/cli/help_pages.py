"""The page ``docs/cli.md``: ``python -m pc_rag.cli.help_pages > docs/cli.md`` writes it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import typer

from pc_rag.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = """\
# Command line

<!-- Generated from the help pages: python -m pc_rag.cli.help_pages > docs/cli.md -->

"""


def help_pages() -> str:
    """Every command with its arguments and options, as Markdown."""
    root = typer.main.get_command(app)
    return _HEADER + "\n".join(_pages(root, "pc-rag"))


def _pages(command: Any, name: str) -> Iterator[str]:  # noqa: ANN401 - typer's own click has no public names
    subcommands = getattr(command, "commands", {})
    yield f"## {name}\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    if subcommands:
        yield "| command | what it does |\n|---|---|"
        for each in subcommands:
            text = inspect.cleandoc(subcommands[each].help or "").partition("\n\n")[0]
            yield f"| `{name} {each}` | {_cell(text)} |"
        yield ""
    shown = [parameter for parameter in command.params if _is_shown(parameter)]
    shown.sort(key=lambda parameter: parameter.param_type_name)  # arguments before options
    rows = [_row(parameter) for parameter in shown]
    if rows:
        yield "| argument or option | what it means | default |\n|---|---|---|"
        yield from rows
        yield ""
    for each, subcommand in subcommands.items():
        yield from _pages(subcommand, f"{name} {each}")


def _is_shown(parameter: Any) -> bool:  # noqa: ANN401 - as above
    return parameter.name not in {"install_completion", "show_completion", "help"}


def _row(parameter: Any) -> str:  # noqa: ANN401 - as above
    is_flag = getattr(parameter, "is_flag", False)
    metavar = parameter.metavar or (parameter.name or "").upper()
    if parameter.param_type_name == "argument":
        name = metavar + ("..." if parameter.nargs == -1 else "")
    else:
        name = ", ".join(parameter.opts) + ("" if is_flag else f" {metavar}")
    text, _, default = (parameter.help or "").partition(" [default: ")
    default = default.rstrip("]")
    if parameter.required:
        default = "required"
    elif not default and not is_flag and parameter.default is not None:
        default = f"`{parameter.default}`"
    if parameter.envvar:
        text += f" Also read from `{parameter.envvar}`."
    return f"| `{name}` | {_cell(text)} | {_cell(default)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    typer.echo(help_pages(), nl=False)
