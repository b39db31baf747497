"""Programs that between them use everything that compiles, each with arguments for every branch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Literal

from pc_rag.pml.program import MaxTokens, program
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

GREETING = "Hello & <welcome>\r\n"
STOPS = (("Trevi", 1), ("Louvre", 0), ("Prado", 2))
QUIET = False
CLOSED = ["Prado", "Trevi", "Louvre"]  # may change, so only conditions can look at it
City = Annotated[str, MaxTokens(20)]


class Mood(enum.Enum):
    CALM = "calm"
    WILD = "wild"


class Size(enum.StrEnum):
    SMALL = "small"
    LARGE = "large"


@dataclass
class Train:
    line: Annotated[str, MaxTokens(5)]
    num_seats: Annotated[int, MaxTokens(4)] = 1


@dataclass
class Plane:
    number: Annotated[int, MaxTokens(6)]
    is_night: bool = False


@dataclass(frozen=True)
class Sight:
    name: str
    year: int


SIGHTS = (Sight("Trevi", 1762), Sight("Louvre", 1793))


@program
def formats(city: City, days: Annotated[int, MaxTokens(9)], price: Annotated[float, MaxTokens(9)]):
    """F-strings as they come, blanks at every border."""
    yield GREETING
    yield f" {city} {city!r} {city!s:>12} {days:03d} {price:.2f} {{{days}}} {city=}\n\n"
    yield city
    yield "" + city + GREETING + "\t "
    yield f"{1 + 2:>3}{'x' * 3}{Size.LARGE}{Mood.CALM.value}{Mood.WILD!r}{len(STOPS)}"
    yield ""


@program
def branches(overseas: bool, days: int, city: City, style: Literal["food", "art", ""]):
    if overseas:
        yield "Passport.\n"
        if not days > 7:
            yield f"No visa for {city}.\n"
    if days < 2:
        yield "short"
    elif 2 <= days <= 3 and not overseas:
        yield f"weekend in {city}"
    elif days in (4, 5) or style == "food":
        yield "week"
    else:
        yield "long"
    if style is None:
        yield "never"
    elif style == "art":
        pass
    elif style:
        yield "Eat."
    if QUIET:
        yield "dead"
    else:
        yield "loud"
    yield f"{'far' if overseas else 'near'} " + ("!" if days > 7 else "")


@program
def matching(  # noqa: C901, PLR0912, PLR0917 - one of each
    style: str | None,
    mood: Mood,
    size: Size,
    by: Train | Plane | None,
    is_late: bool | None,
    days: int,
) -> Iterator[str]:
    match style:
        case "food" | "wine":
            yield "eat "
        case "rome":
            yield "rome "
        case None:
            yield "none "
        case "":
            yield "empty "
        case _:
            yield "other "
    match mood:
        case Mood.CALM:
            yield "calm "
        case Mood.WILD if days > 3:
            yield "wild for long "
    match size:
        case Size.SMALL:
            pass
        case Size.LARGE:
            yield "large "
    match by:
        case Train(line=line, num_seats=1 as seats):
            yield f"line {line}, {seats} seat "
        case Train(line, seats):
            yield f"line {line}, {seats:>2} seats "
        case Plane(is_night=True) as plane:
            yield f"night flight {plane.number} "
        case Plane():
            yield f"flight {by.number} "
    match is_late:
        case True:
            yield "late"
        case False | None:
            yield "in time"
    match days:
        case int(n) if n == -1:
            yield "before"
        case -2 | 3:
            yield "three"


@program
def narrowing(by: Train | Plane, days: int):
    if isinstance(by, Train) and days > 1:
        yield f"Train {by.line} {by.num_seats}"
    elif isinstance(by, (Plane, Mood)):
        yield f"Plane {by.number}"
    match by:
        case Mood() | object() as vehicle if isinstance(vehicle, Train):
            yield vehicle.line
        case object() if isinstance(by, object) and isinstance(by, Plane):
            yield f"{by.number}"


@program
def loops(  # noqa: C901 - one of each
    first: str, city: City
):
    for i, (stop, floor) in enumerate(STOPS, start=1):
        yield f"{i}. {stop}"
        if floor == 0:
            yield " (ground)"
        elif floor > 1:
            yield f" (upstairs, {city})"
        if stop == first:
            yield " first"
        if stop in CLOSED and city == "Madrid":
            yield " closed"
        yield "\n"
    for left, right in zip("ab", range(2, 0, -1), strict=True):
        match left:
            case "a":
                yield f"{left}{right}"
            case other if first == other:
                yield f"[{other}]"
    for sight in SIGHTS:
        for size in Size:
            if size is Size.SMALL:
                yield f"{sight.name} {sight.year} {size}; "
    for _ in ():
        yield "never"
    yield from ("x", "y")


@program(name="the.hotel")
def hotel(city: City, stars: Annotated[int, MaxTokens(2)] = 3, late: bool = False) -> str:
    """Where to sleep."""
    text = f"Hotel in {city}, {stars} stars"
    if late:
        text += f" (late in {city})"
    elif stars > 4:
        text += " (luxury)"
    return text + ".\n"


@program
def night(city: City, by: Train = Train("N1"), stars: int = 5):  # noqa: B008 - as users may write it
    yield f"Night in {city} by {by.line}: "
    yield hotel(city, stars, late=stars < 3)
    yield hotel(f"{city} Nord", late=False)


@program
def calls(city: City, days: int, by: Train):
    yield "Go. "
    yield from hotel(city)
    yield from night(city, by)
    if days > 1:
        yield f"{hotel('Bari', days - 1)}{''.join(night(city='Bari'))}"
        for town in ("Pisa", "Siena"):
            yield from night(town, stars=days)
    yield from night(by.line)
    yield "End."


@program
def returned(city: City, is_far: bool):
    return f"To {city}" + (" (far)" if is_far else "") + "."


@program
def built(user: City, schema: Annotated[int, MaxTokens(3)], xmlns: City, is_far: bool) -> str:
    text: str = ""
    text += f"{user}{schema}{xmlns}"
    for each in range(2):
        if is_far:
            text += f"{each}{user}{schema}"
    return f"{text}{' far' if is_far else ''}!"


@program(role=Role.SYSTEM)
def head(city: City):
    yield f"You know {city}."


@program(role=Role.USER)
def question(city: City, is_far: bool):
    yield f"How far is {city}"
    if is_far:
        yield " from here"
    yield "?"


@program
def chat(city: City, is_far: bool):
    yield from head(city)
    if is_far:
        yield from question(city, is_far)
    else:
        yield from question("Rome", is_far=False)


CITIES = ("Rome", "a & b\n\"'<x>", "")
TRAINS = (Train("A"), Train("B", 12))
PLANES = (Plane(7), Plane(8, is_night=True))

CALLS = [
    *((formats, each) for each in product(CITIES, (0, 12, -3), (1.0, 2.345))),
    *(
        (branches, each)
        for each in product((True, False), (0, 2, 3, 4, 8), CITIES[:1], ("food", "art", "", None))
    ),
    *(
        (matching, each)
        for each in product(
            ("food", "wine", "rome", None, "", "x"),
            Mood,
            Size,
            (*TRAINS, *PLANES, None),
            (True, False, None),
            (-1, -2, 3, 4),
        )
    ),
    *((narrowing, each) for each in product((*TRAINS, *PLANES), (1, 2))),
    *(
        (loops, each)
        for each in product(("Trevi", "Louvre", "Prado", "b", "x"), ("Rome", "Madrid"))
    ),
    *((hotel, each) for each in product(CITIES, (1, 5), (True, False))),
    *((night, each) for each in product(CITIES, TRAINS, (1, 3, 5))),
    *((calls, each) for each in product(CITIES, (1, 2, 3, 5, 6), TRAINS)),
    *((returned, each) for each in product(CITIES, (True, False))),
    *((built, each) for each in product(CITIES, (1,), CITIES, (True, False))),
    *((chat, each) for each in product(CITIES, (True, False))),
]
"""Programs with positional arguments."""
