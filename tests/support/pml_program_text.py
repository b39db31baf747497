"""Random programs as the text of a module, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

HEAD = """\
from __future__ import annotations
import enum
from dataclasses import dataclass
from typing import Annotated
from pc_rag.pml.program import MaxTokens, program

City = Annotated[str, MaxTokens(20)]
WORDS = ("aa", "b", "")
GREETING = "<hi> & \\r\\n"


class Mood(enum.Enum):
    CALM = 1
    WILD = 2


@dataclass
class Train:
    line: City
    seats: Annotated[int, MaxTokens(5)]


@dataclass
class Plane:
    line: City
    is_late: bool


@program
def told(city: City, days: Annotated[int, MaxTokens(5)] = 2, flag: bool = False):
    return f"told {city}" + (f" {days}" if flag or days > 2 else "")


@program
def yielded(city: City, kind: str = "x"):
    match kind:
        case "x":
            yield f"x{city}"
        case "aa" | "b":
            yield city
    yield "."
"""

SIGNATURE = (
    "flag: bool, n: int, kind: str | None, mood: Mood, by: Train | Plane, city: City, "
    "days: Annotated[int, MaxTokens(9)]"
)
_CONSTANTS = st.text("aé<&\"'{}\\\n\t ", max_size=4).map(repr)
_ATOMS = st.sampled_from([
    "flag", "n", "kind", "n > 1", "0 <= n < 2", "kind == 'aa'", "kind in WORDS", "n not in (1, 2)",
    "kind is None", "mood is Mood.CALM", "mood == Mood.WILD", "isinstance(by, Train)", "n % 2",
    "isinstance(by, (Plane, Mood))", "len(WORDS) > n", "WORDS[0] == kind", "-n < days", "True", "0",
    "city", "n - 1 == -1", "[1, n]",
])  # fmt: skip
CONDITIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        inner.map("not {}".format),
        st.tuples(inner, inner).map(lambda pair: "({} and {})".format(*pair)),
        st.tuples(inner, inner).map(lambda pair: "({} or {})".format(*pair)),
        st.tuples(inner, inner, inner).map(lambda three: "({} if {} else {})".format(*three)),
    ),
    max_leaves=3,
)
_VALUES = st.sampled_from(
    [
        "city",
        "city!r",
        "city:>7",
        "days",
        "days:+d",
        "days!s:<4",
        "by.line",
        "GREETING",
        "WORDS",
        "1",
    ]
)
_CASES = {
    "kind": ["'aa'", "'b' | ''", "None", "'aa' | None", "str(found)"],
    "n": ["0", "1 | 2", "-1", "int(found) if found > 1", "True"],
    "mood": ["Mood.CALM", "Mood.WILD if flag", "Mood.CALM | Mood.WILD"],
    "by": [
        "Train(line=found)",
        "Train(found, 1)",
        "Plane(is_late=True)",
        "Plane() as found",
        "Train()",
    ],
    "flag": ["True", "False", "bool()"],
}
_LOOPS = {
    "WORDS": "each", "range(2)": "each", "('p', 'q')": "each", "enumerate(WORDS, 1)": "i, each",
    "zip('ab', (1, 2), strict=True)": "i, each", "Mood": "each", "()": "each",
}  # fmt: skip
_CALLS = [
    "told(city)", "told('c', n)", "told(city, days=n, flag=flag)", "told(by.line, flag=not flag)",
    "told(f'{city}{n}')", "''.join(yielded(city))", "''.join(yielded(city, kind))",
]  # fmt: skip


@dataclass(frozen=True)
class _Scope:
    """Names that a statement may use besides the parameters: their texts, and their conditions."""

    values: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    depth: int = 0


class _Writer:
    def __init__(self, draw: st.DrawFn, say: str) -> None:
        self._draw = draw
        self._say = say

    def text(self, scope: _Scope) -> str:
        value = self._draw(st.one_of(_VALUES, st.sampled_from(scope.values or ("city",))))
        kinds = ["constant", "value", "value", "sum", "choice", "call", "bare"]
        match self._draw(st.sampled_from(kinds)):
            case "constant":
                return self._draw(_CONSTANTS)
            case "value":
                return f'f"-{{{value}}}"'
            case "sum":
                return f"{self.text(scope)} + {self.text(scope)}"
            case "choice":
                return f"({self.text(scope)} if {self.condition(scope)} else {self.text(scope)})"
            case "call":
                return self._draw(st.sampled_from(_CALLS))
            case _:
                return self._draw(st.sampled_from(["city", "GREETING", "by.line"]))

    def condition(self, scope: _Scope) -> str:
        own = st.sampled_from(scope.conditions) if scope.conditions else CONDITIONS
        return self._draw(st.one_of(CONDITIONS, own))

    def body(self, scope: _Scope) -> list[str]:
        lines = []
        for _ in range(self._draw(st.integers(1, 3))):
            kinds = ["say", "say"] + (["if", "match", "for"] if scope.depth < 3 else [])
            match self._draw(st.sampled_from(kinds)):
                case "if":
                    lines += self._if(scope)
                case "match":
                    lines += self._match(scope)
                case "for":
                    lines += self._for(scope)
                case _:
                    lines.append(f"{self._say} {self.text(scope)}")
        return lines

    def _inside(self, scope: _Scope, values=(), conditions=()) -> list[str]:
        values, conditions = (*scope.values, *values), (*scope.conditions, *conditions)
        inner = _Scope(values, conditions, scope.depth + 1)
        lines = ["pass"] if self._draw(st.integers(0, 5)) == 0 else self.body(inner)
        return [f"    {line}" for line in lines]

    def _if(self, scope: _Scope) -> list[str]:
        lines = [f"if {self.condition(scope)}:", *self._inside(scope)]
        for _ in range(self._draw(st.integers(0, 2))):
            lines += [f"elif {self.condition(scope)}:", *self._inside(scope)]
        if self._draw(st.booleans()):
            lines += ["else:", *self._inside(scope)]
        return lines

    def _match(self, scope: _Scope) -> list[str]:
        subject = self._draw(st.sampled_from(sorted(_CASES)))
        lines = [f"match {subject}:"]
        cases = self._draw(st.lists(st.sampled_from(_CASES[subject]), min_size=1, max_size=3))
        if any("found" in value for value in scope.values + scope.conditions):
            cases = [case for case in cases if "found" not in case] or [_CASES[subject][0]]
            cases = [case for case in cases if "found" not in case] or ["object()"]
        for case in cases:
            values, conditions = (), ()
            if "found" in case:
                is_line = case.startswith("Train")
                values = ("found", "found!r") if is_line else ()
                values = ("found.line",) if case.startswith("Plane") else values
                conditions = ("found", "found == 'aa'", "found == 2")
            lines += [f"    case {case}:"]
            lines += [f"    {line}" for line in self._inside(scope, values, conditions)]
        if self._draw(st.booleans()):
            lines += ["    case _:", *(f"    {line}" for line in self._inside(scope))]
        return lines

    def _for(self, scope: _Scope) -> list[str]:
        if any("each" in value for value in scope.values):
            return [f"{self._say} ''"]
        values = self._draw(st.sampled_from(sorted(_LOOPS)))
        target = _LOOPS[values]
        names = target.split(", ")
        known = (*names, *(f"{name}!r:>6" for name in names))
        conditions = (*names, f"{names[-1]} == kind", f"{names[0]} in (0, 'a') and flag")
        return [f"for {target} in {values}:", *self._inside(scope, known, conditions)]


@st.composite
def program_texts(draw: st.DrawFn) -> str:
    """A module with one program ``made``, which yields its text or returns it."""
    if draw(st.booleans()):
        lines = _Writer(draw, "yield").body(_Scope())
        lines.append(draw(st.sampled_from(["yield ''", "yield from yielded('c', kind)"])))
    else:
        writer = _Writer(draw, "text +=")
        lines = [f"text = {writer.text(_Scope())}", *writer.body(_Scope())]
        lines.append(
            draw(st.sampled_from(["return text", "return text + city", 'return f"{text}."']))
        )
    body = "".join(f"    {line}\n" for line in lines)
    return f"{HEAD}\n\n@program\ndef made({SIGNATURE}):\n{body}"


@st.composite
def arguments(draw: st.DrawFn, module: object) -> tuple:
    """Arguments for ``made`` in a module of ``program_texts``."""
    texts = st.text("aR<&\"'\n é", max_size=4)
    train = st.builds(module.Train, texts, st.integers(0, 2))
    plane = st.builds(module.Plane, texts, st.booleans())
    kinds = st.sampled_from(["aa", "b", "", "x", None])
    moods, numbers = st.sampled_from(module.Mood), st.integers(-2, 3)
    return draw(
        st.tuples(st.booleans(), numbers, kinds, moods, train | plane, texts, st.integers(-9, 99))
    )
