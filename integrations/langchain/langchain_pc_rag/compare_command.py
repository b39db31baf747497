"""The command line of ``python -m langchain_pc_rag.compare``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable

from langchain_pc_rag.compare import Comparison, compare_chains
from pc_rag.errors import ConfigError, PromptCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_FAILED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two models under one chain; results go to stdout, progress to stderr.

    Args:
        arguments: Of the command line; the process's own by default.

    Returns:
        0 where both models answered, 1 where the input was refused, 3 where a model or its chain
        failed. Wrong usage exits with 2.
    """
    options = _parser().parse_args(arguments)
    try:
        comparison = _compare(options)
    except ConfigError as error:
        return _fail(error, EXIT_REFUSED)
    except Exception as error:  # noqa: BLE001 - the edge: any failure of a model is a message
        return _fail(error, EXIT_FAILED)
    _show(comparison, as_json=options.json)
    return EXIT_OK


def _compare(options: argparse.Namespace) -> Comparison:
    """Find everything that was named before any model is made, then ask."""
    build = _find(options.build)
    if not callable(build):
        raise ConfigError(
            f"{options.build}: expected a function that makes a chain for a model, found a "
            f"{type(build).__name__}"
        )
    baseline, candidate = _find(options.baseline), _find(options.candidate)
    questions = _read_questions(options.questions)
    key = options.input_key
    return compare_chains(
        build,
        questions,
        baseline=_model(baseline),
        candidate=_model(candidate),
        rounds=options.rounds,
        as_input=(lambda question: {key: question}) if key else str,
        on_progress=_say,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m langchain_pc_rag.compare",
        description="Ask two models the same questions through your own chain, in turns, and "
        "compare times to the first token, cache hits and answers.",
    )
    where = "MODULE:NAME"
    parser.add_argument("build", metavar=where, help="function that makes your chain for a model")
    for name in ("baseline", "candidate"):
        parser.add_argument(
            f"--{name}",
            metavar=where,
            required=True,
            help="a model, or a function without arguments that makes one",
        )
    parser.add_argument(
        "--questions", metavar="FILE", required=True, help="text file with a question a line"
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=_rounds,
        default=3,
        help="how often each is asked; the first round warms up and is in no median (default 3)",
    )
    parser.add_argument(
        "--input-key",
        metavar="KEY",
        help="ask with {KEY: question}, for chains that take a dictionary; else with the text",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, raw samples included")
    return parser


def _rounds(text: str) -> int:
    least = 2
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _find(path: str) -> object:
    """What ``module:name`` names."""
    module_name, separator, name = path.partition(":")
    if not (module_name and separator and name):
        raise ConfigError(f"{path!r} is not MODULE:NAME, for example mychain:build")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{path}: importing {module_name} failed: no module named {error.name!r}; "
                "install it first"
            ) from error
        raise ConfigError(
            f"{path}: there is no module {module_name!r}; run the command where it can be imported"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{path}: {module_name} has no {name!r}; name what it defines")
        found = getattr(found, part)
    return found


def _model(found: object) -> Any:
    """A model as it is, or what a function makes."""
    if isinstance(found, Runnable) or not callable(found):
        return found
    make: Callable[[], object] = found
    return make()


def _read_questions(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: questions cannot be read: {error}") from error
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise ConfigError(f"{path}: there is no question; write one a line")
    return questions


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _fail(error: BaseException, code: int) -> int:
    kind = "" if isinstance(error, PromptCacheError) else f"{type(error).__name__}: "
    _say(f"error: {kind}{error}")
    return code


def _show(comparison: Comparison, *, as_json: bool) -> None:
    if as_json:
        json.dump(comparison.to_dict(), sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(f"{comparison.table()}\n")
