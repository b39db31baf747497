"""Where errors become messages and exit codes; commands themselves catch nothing."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from pc_rag.cli.output import say
from pc_rag.errors import (
    ConfigError,
    IngestError,
    LayoutError,
    PMLError,
    PromptCacheError,
    PromptError,
)


class ExitCode(IntEnum):
    """What ``pc-rag`` exits with."""

    OK = 0
    REFUSED = 1
    """The input cannot be used: a document, a prompt, a PML file."""
    USAGE = 2
    """An option or a setting is wrong."""
    FAILED = 3
    """The store or the model failed, or lacks something."""
    INTERRUPTED = 130
    """Ctrl-C, as shells report it."""


_REFUSALS = (IngestError, LayoutError, PMLError, PromptError)


def exit_code_of(error: PromptCacheError) -> ExitCode:
    """The exit code that tells a script what kind of error it met."""
    if isinstance(error, _REFUSALS):
        return ExitCode.REFUSED
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    return ExitCode.FAILED


class Edge(TyperGroup):
    """The outermost group: every command runs inside it, from the shell and in tests."""

    # The context is click's or typer's own copy of it, by the version of typer.
    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - see above
        """Run a command; an error of ours ends it with a message and never with a traceback.

        Raises:
            typer.Exit: With the ``ExitCode`` of the error.
        """
        try:
            return super().invoke(ctx)
        except PromptCacheError as error:
            say(f"error: {error}", style="bold red")
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as interrupt:
            say(
                "interrupted; what was stored stays, and running the command again goes on there",
                style="yellow",
            )
            raise typer.Exit(ExitCode.INTERRUPTED) from interrupt
