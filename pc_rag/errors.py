"""The tree of errors a caller of pc-rag can meet.

Every message says what happened, where, what was observed against what is allowed, and what to do
next. The root is a ``RuntimeError`` on purpose: frameworks around us turn ``ValueError`` and
``TypeError`` into empty answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class PromptCacheError(RuntimeError):
    """Root of every error that pc-rag raises."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One fault in a document.

    Attributes:
        line: 1-based line, 0 where the fault belongs to no line.
        column: 1-based column, 0 where unknown.
        message: What is wrong, observed against allowed, and what to do.
    """

    line: int
    column: int
    message: str

    def __str__(self) -> str:
        if not self.line:
            return self.message
        place = f"line {self.line}" + (f", column {self.column}" if self.column else "")
        return f"{place}: {self.message}"


NO_SOURCE = "<string>"
"""Of a document that was given as text."""


class _DocumentError(PromptCacheError):
    """All problems of one document at once.

    Args:
        problems: Every fault found, in document order.
        source: File name or other name of the document, for the message.
    """

    def __init__(self, problems: tuple[Problem, ...] | str, source: str = NO_SOURCE) -> None:
        if isinstance(problems, str):
            problems = (Problem(0, 0, problems),)
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        return "\n".join(map(self._located, self.problems))

    def _located(self, problem: Problem) -> str:
        if self.source == NO_SOURCE and not problem.line:
            return problem.message
        return f"{self.source}: {problem}"


class PMLError(_DocumentError):
    """A PML document that cannot be used."""


class PMLSyntaxError(PMLError):
    """A PML document that is not well-formed XML, or uses XML features that PML refuses."""


class SchemaError(PMLError):
    """A well-formed schema that breaks a rule of PML."""


class PromptError(_DocumentError):
    """A prompt that does not fit its schema, or an input that no prompt can be made of."""


class IngestError(PromptCacheError):
    """A document that cannot be read, or that a corpus cannot take in."""


class LayoutError(PromptCacheError):
    """Tokens that do not fit: a context overflow, or a chunk longer than its slot."""


class ModelError(PromptCacheError):
    """A model that cannot be loaded or used as asked."""


class UnsupportedModelError(ModelError):
    """A model without a property that prompt caching needs.

    Args:
        message: What is missing, and what would be needed.
        architecture: The model's architecture, for example ``MambaForCausalLM``.
        capability: The missing property, for example ``position encoding``.
    """

    def __init__(self, message: str, architecture: str = "", capability: str = "") -> None:
        self.architecture = architecture
        self.capability = capability
        super().__init__(message, architecture, capability)

    def __str__(self) -> str:
        return str(self.args[0])


class StoreError(PromptCacheError):
    """A store that cannot do what was asked."""


class EntryNotFound(StoreError):
    """No tier holds the entry."""


class StoreFull(StoreError):
    """The bytes do not fit, and nothing that may be evicted would make room."""


class CorruptEntry(StoreError):
    """A stored file whose bytes are not what was written; it is quarantined, never served."""


class FingerprintMismatch(StoreError):
    """An entry that was written for another model, tokenizer or numeric type."""


class StoreIOError(StoreError):
    """The medium failed; the entry may be intact."""


class GenerationError(PromptCacheError):
    """Generation cannot start or go on."""


class GenerationTimeoutError(GenerationError, TimeoutError):
    """Generation took longer than its caller allowed."""


class ConfigError(PromptCacheError):
    """A setting whose value is malformed or contradicts another."""


class MissingDependencyError(PromptCacheError):
    """A feature whose optional dependency is not installed.

    Args:
        feature: What was asked for.
        extra: The extra that brings it.
        distribution: Whose extra it is.
    """

    def __init__(self, feature: str, extra: str, distribution: str = "pc-rag") -> None:
        self.feature = feature
        self.extra = extra
        self.distribution = distribution
        super().__init__(feature, extra, distribution)

    def __str__(self) -> str:
        wanted = f"{self.distribution}[{self.extra}]"
        return f"{self.feature} needs an optional package: pip install '{wanted}'"


def require(module: str, *, feature: str, extra: str, distribution: str = "pc-rag") -> Any:  # noqa: ANN401 - a module has no type
    """Import an optional module, or say which extra brings it.

    Args:
        module: Dotted name of the module.
        feature: What needs it, for the message.
        extra: The extra that installs it.
        distribution: Whose extra it is.

    Raises:
        MissingDependencyError: The module is not installed.
    """
    import importlib  # noqa: PLC0415 - errors stay a leaf that costs nothing to import

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".", maxsplit=1)[0] != error.name.split(".", maxsplit=1)[0]:
            raise
        raise MissingDependencyError(feature, extra, distribution) from error
