"""Every setting of the engine in one frozen object: values only, validated once.

Precedence, per setting: argument, TOML file, ``PC_RAG_*`` environment variable, default. A
malformed value is an error that names where it came from; it never falls back to the next source.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from pc_rag.errors import ConfigError
from pc_rag.types import PositionPolicy, StorageDtype, Visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from enum import StrEnum

    Parser: TypeAlias = Callable[[object], object]
    Choice = TypeVar("Choice", bound=StrEnum)

ENVIRONMENT_PREFIX: Final = "PC_RAG_"
"""A setting ``memory_bytes`` is read from the variable ``PC_RAG_MEMORY_BYTES``."""

AUTO: Final = "auto"
"""The value of ``storage_dtype`` that stands for the model's compute dtype."""

_LARGEST_INTEGER: Final = 2**63 - 1  # what SQLite and tensor sizes hold
_NONE: Final = "none"  # how text says None: TOML and the environment have no null
_BYTE_UNITS: Final = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
_BYTES_PATTERN: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)[ ]?([A-Za-z]{0,3})")
_INTEGER_PATTERN: Final = re.compile(r"[0-9]{1,19}")
_REPAIR_PATTERN: Final = re.compile(r"none|link:[1-9][0-9]{0,8}")
_FLAGS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


class _Refused(Exception):
    """A value that a setting does not take; the message says what it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine plans, stores and measures. Values only: no device, no path, no model.

    Every field also takes the text that a file or a variable would hold (``"512MiB"``,
    ``"packed"``), and holds the parsed value afterwards.

    Attributes:
        position_policy: How spans are given out. Where positions are learned (GPT-2, OPT) take
            ``reserved``: an entry serves at one start only, and a slot is one start.
        visibility: What a module may attend when it is encoded: ``module`` or ``prefix``.
            (``scaffold`` is declared in PML, never by a setting.)
        repair: Which cached tokens are recomputed: ``"none"``, or ``"link:n"`` for the first n
            tokens of every chunk after the first.
        memory_bytes: Capacity of the memory tier.
        disk_bytes: Capacity of the disk tier; ``None`` is unlimited.
        prefix_cache_bytes: Capacity of the exact prefix cache; 0 switches it off.
        storage_dtype: Numeric type of stored keys and values; ``"auto"`` is the compute dtype.
        slot_tokens: Length of every slot of a corpus under ``reserved``; ``packed`` needs none.
        chunk_tokens: Largest number of tokens of a chunk that a corpus cuts.
        tenant: Salt inside every key; entries of two tenants never meet.
        reuse: Whether stored KV is used; ``False`` is the uncached arm.
        prefetch_siblings: Importing one member of a union brings its other members into the
            nearest tier, in the background, once the request has its first token.
        keep_siblings: The use of one member of a union counts as a use of all, so that eviction
            keeps or drops them together.
        synchronize_timings: Wait for the device around every timestamp, so that each phase owns
            its kernels. Costs time; TTFT itself is right without.
        context_limit: Largest number of position IDs of a request, generated tokens included;
            ``None`` is the model's own.

    Raises:
        ConfigError: Values are malformed or contradict each other; all of them are named.
    """

    position_policy: PositionPolicy = PositionPolicy.PACKED
    visibility: Visibility = Visibility.PREFIX
    repair: str = _NONE
    memory_bytes: int = 2 * 1024**3
    disk_bytes: int | None = None
    prefix_cache_bytes: int = 256 * 1024**2
    storage_dtype: StorageDtype | Literal["auto"] = AUTO
    slot_tokens: int | None = None
    chunk_tokens: int = 256
    tenant: str = ""
    reuse: bool = True
    prefetch_siblings: bool = False
    keep_siblings: bool = False
    synchronize_timings: bool = False
    context_limit: int | None = None

    def __post_init__(self) -> None:
        given = {name: _Given(getattr(self, name), f"argument {name}") for name in _PARSERS}
        for name, value in _parse_all(given).items():
            object.__setattr__(self, name, value)

    @classmethod
    def load(
        cls,
        *,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] = os.environ,
        **arguments: object,
    ) -> EngineConfig:
        """Read the settings from every source; nearer sources win, setting by setting.

        Args:
            file: A TOML file with settings as its top-level keys. ``"none"`` stands for ``None``.
            environ: Variables to read. Those with our prefix that name no setting are left alone:
                other parts of pc-rag have variables of their own.
            **arguments: Settings by name. ``None`` is a value, not an absent argument.

        Raises:
            ConfigError: The file cannot be read, a file key or an argument names no setting, or
                values are malformed or contradict each other.
        """
        defaults = {each.name: _Given(each.default, "default") for each in fields(cls)}
        given = {
            **defaults,
            **_from_environment(environ),
            **(_from_file(Path(file)) if file is not None else {}),
            **_from_arguments(arguments),
        }
        values: dict[str, Any] = _parse_all(given)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was given, and where."""

    value: object
    source: str


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    variables = {name: f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in _PARSERS}
    return {
        name: _Given(environ[variable], f"environment variable {variable}")
        for name, variable in variables.items()
        if variable in environ
    }


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(
            f"file {path}: cannot be read ({error.strerror}); name a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path}: not TOML: {error}") from error
    _refuse_unknown(table, source=f"file {path}, key")
    return {name: _Given(value, f"file {path}, key {name}") for name, value in table.items()}


def _from_arguments(arguments: Mapping[str, object]) -> dict[str, _Given]:
    _refuse_unknown(arguments, source="argument")
    return {name: _Given(value, f"argument {name}") for name, value in arguments.items()}


def _refuse_unknown(names: Iterable[str], *, source: str) -> None:
    problems = []
    for name in names:
        if name in _PARSERS:
            continue
        nearest = difflib.get_close_matches(name.lower(), _PARSERS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"settings are {', '.join(_PARSERS)}"
        problems.append(f"{source} {name}: no such setting; {advice}")
    if problems:
        raise ConfigError("\n".join(problems))


def _parse_all(given: Mapping[str, _Given]) -> dict[str, object]:
    """Every value parsed, or one error that lists all that are wrong with their sources."""
    values: dict[str, object] = {}
    problems: list[str] = []
    for name, parse in _PARSERS.items():
        try:
            values[name] = parse(given[name].value)
        except _Refused as refusal:
            problems.append(f"{given[name].source}: {given[name].value!r} is not {refusal}")
    problems.extend(_contradictions(values, given))
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def _contradictions(values: Mapping[str, object], given: Mapping[str, _Given]) -> Iterable[str]:
    chunk, slot = values.get("chunk_tokens"), values.get("slot_tokens")
    if isinstance(chunk, int) and isinstance(slot, int) and chunk > slot:
        yield (
            f"chunk_tokens is {chunk} ({given['chunk_tokens'].source}) but slot_tokens is {slot} "
            f"({given['slot_tokens'].source}): no slot would hold a chunk; lower chunk_tokens to "
            f"{slot} or raise slot_tokens to {chunk}"
        )


def _choice(kind: type[Choice], *, without: tuple[Choice, ...] = ()) -> Parser:
    allowed = tuple(each for each in kind if each not in without)

    def parse(value: object) -> Choice:
        if isinstance(value, str):
            for each in allowed:
                if value == each:
                    return each
        raise _Refused("one of " + ", ".join(allowed))

    return parse


def _integer(minimum: int) -> Parser:
    def parse(value: object) -> int:
        if isinstance(value, str) and _INTEGER_PATTERN.fullmatch(value):
            value = int(value)
        # bool is an int to Python; `slot_tokens = true` is a mistake to its reader
        if isinstance(value, int) and not isinstance(value, bool):
            number = int(value)
            if minimum <= number <= _LARGEST_INTEGER:
                return number
        raise _Refused(f"a whole number of at least {minimum} and at most {_LARGEST_INTEGER}")

    return parse


def _bytes(minimum: int) -> Parser:
    as_integer = _integer(minimum)

    def parse(value: object) -> object:
        if isinstance(value, str):
            match = _BYTES_PATTERN.fullmatch(value)
            factor = _BYTE_UNITS.get(match[2].upper()) if match else None
            value = int(Decimal(match[1]) * factor) if match and factor else None
        try:
            return as_integer(value)
        except _Refused as refusal:
            raise _Refused(
                f"{refusal}, in bytes, or a text such as '512MiB' or '2GB' "
                "(units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)"
            ) from None

    return parse


def _optional(parse_value: Parser) -> Parser:
    def parse(value: object) -> object:
        if value is None or value == _NONE:
            return None
        try:
            return parse_value(value)
        except _Refused as refusal:
            raise _Refused(f"{refusal}; or {_NONE}") from None

    return parse


def _flag(value: object) -> bool:
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    if isinstance(value, bool):
        return value
    raise _Refused("true or false")


def _repair(value: object) -> str:
    if isinstance(value, str) and _REPAIR_PATTERN.fullmatch(value):
        return str(value)
    raise _Refused("'none' or 'link:n' with a whole number n of at least 1, such as 'link:8'")


def _storage_dtype(value: object) -> StorageDtype | Literal["auto"]:
    if value == AUTO:
        return AUTO
    for dtype in StorageDtype:
        if value == dtype:
            return dtype
    raise _Refused("one of " + ", ".join((AUTO, *StorageDtype)))


def _tenant(value: object) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            pass
        else:
            return value
    raise _Refused("a text that UTF-8 can encode: it becomes part of every key")


_PARSERS: Final[dict[str, Parser]] = {
    "position_policy": _choice(PositionPolicy),
    "visibility": _choice(Visibility, without=(Visibility.SCAFFOLD,)),
    "repair": _repair,
    "memory_bytes": _bytes(1),
    "disk_bytes": _optional(_bytes(1)),
    "prefix_cache_bytes": _bytes(0),
    "storage_dtype": _storage_dtype,
    "slot_tokens": _optional(_integer(1)),
    "chunk_tokens": _integer(1),
    "tenant": _tenant,
    "reuse": _flag,
    "prefetch_siblings": _flag,
    "keep_siblings": _flag,
    "synchronize_timings": _flag,
    "context_limit": _optional(_integer(1)),
}
"""How each setting is read; its keys are exactly the fields of ``EngineConfig``."""
