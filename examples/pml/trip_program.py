"""A schema out of a Python function: its branches are encoded once, its arguments are computed.

python examples/pml/trip_program.py

The plain function still says what the model reads; the program reads the same from stored KV.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

from _report import ENGINE, compare

from pc_rag import MaxTokens, PromptCache, Role, program

if TYPE_CHECKING:
    from collections.abc import Iterator

HABITS = ("I get up late", "I do not mind rain", "I travel without a car")


class Evening(Enum):
    """What a day ends with."""

    MUSIC = "music"
    QUIET = "quiet"


@program
def evening(kind: Evening) -> Iterator[str]:
    """How a day should end."""
    match kind:
        case Evening.MUSIC:
            yield "In the evening I want to hear people play, in a room where one can also eat. "
        case Evening.QUIET:
            yield "In the evening I want to sit by the water with a book until it gets dark. "


@program(role=Role.USER)
def trip(
    days: Annotated[int, MaxTokens(4)],
    city: Annotated[str, MaxTokens(8)],
    *,
    with_children: bool = False,
    ends_with: Evening = Evening.QUIET,
) -> Iterator[str]:
    """A trip to one town."""
    yield f"I have {days} days for a trip to {city}. "
    for habit in HABITS:
        yield f"{habit}. "
    if with_children:
        yield (
            "My children come along: they are six and nine years old, they like animals and boats, "
            "and after two hours of walking they want to sit down and eat something sweet. "
        )
    else:
        yield (
            "I come alone, I like to walk all day, and I would rather look at one house for an "
            "hour than at twenty from a bus. "
        )
    yield from evening(ends_with)


def main() -> None:
    """Ask for two trips, each as the plain function would say it."""
    with PromptCache.from_pretrained("smollm2", config=ENGINE) as engine:
        engine.add_schema(trip.schema)
        for wishes in (
            {"days": 3, "city": "Lisbon", "ends_with": Evening.MUSIC},
            {"days": 12, "city": "Trondheim", "with_children": True},
        ):
            print(f"\n== {''.join(trip(**wishes))}")
            prompt = trip.prompt(**wishes).with_text("What shall I do on the first day?")
            compare(engine, prompt, max_new_tokens=32)


if __name__ == "__main__":
    main()
