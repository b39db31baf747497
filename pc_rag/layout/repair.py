"""Which stored tokens a request recomputes: repair policies, and the one token no prompt can spare.

Repair is only a larger set of fresh tokens: ids and positions of a plan never change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.errors import ConfigError, PromptError
from pc_rag.layout.plan import Cached, Fresh, FreshKind, RequestPlan, Reused, split_cached
from pc_rag.types import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pc_rag.layout.plan import Part


@dataclass(frozen=True, slots=True)
class NoRepair:
    """The paper: stored tokens are used as they are."""

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class LinkRepair:
    """The first tokens of every chunk after the first are recomputed, to see the chunks before.

    Attributes:
        num_tokens: How many of each chunk; at least 1.

    Raises:
        ConfigError: ``num_tokens`` is smaller than 1.
    """

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ConfigError(
                f"repair 'link:{self.num_tokens}': the number of tokens must be at least 1; use "
                "'none' to recompute nothing"
            )

    def __str__(self) -> str:
        return f"link:{self.num_tokens}"


Repair: TypeAlias = NoRepair | LinkRepair

_LINK = re.compile(r"link:([0-9]{1,9})")


def parse_repair(text: str) -> Repair:
    """Read a repair policy as it stands in configurations: ``none`` or ``link:N``.

    Raises:
        ConfigError: The text is neither.
    """
    if text == "none":
        return NoRepair()
    match = _LINK.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"repair {text!r} is unknown; allowed: 'none', 'link:N' with N tokens, as in 'link:8'"
        )
    return LinkRepair(int(match.group(1)))


def apply_repair(
    plan: RequestPlan, repair: Repair, is_chunk: Callable[[Cached | Fresh], bool]
) -> RequestPlan:
    """Turn the stored tokens that a policy names into fresh ones.

    Args:
        plan: The plan without repair. Parts of one occurrence of an entry are one chunk, whatever
            arguments stand between them; so are the members of a scaffold, which see each other.
        repair: The policy.
        is_chunk: Whether a part belongs to a retrieved chunk rather than to a prefix or to the
            request's own text. Asked of fresh parts too: a chunk that missed the store is a chunk.

    Returns:
        A plan with the same token ids at the same position IDs. Repaired parts have kind ``repair``
        and the label of their chunk.
    """
    if isinstance(repair, NoRepair):
        return plan

    def repaired() -> Iterator[Part]:
        num_chunks, current, num_left = 0, None, 0
        for part in plan.parts:
            if isinstance(part, Reused) or not is_chunk(part):
                yield part
                continue
            if part.occurrence is None or part.occurrence != current:
                num_chunks += 1
                current, num_left = part.occurrence, repair.num_tokens
            if isinstance(part, Cached) and num_chunks > 1:
                yield from _recompute_first(part, num_left)
                num_left -= min(num_left, len(part.token_ids))
            else:
                yield part

    return RequestPlan(tuple(repaired()))


def _recompute_first(part: Cached, num_tokens: int) -> Iterator[Part]:
    link, rest = split_cached(part, num_tokens)
    if link is not None:
        yield _recomputed(link)
    if rest is not None:
        yield rest


def with_fresh_end(plan: RequestPlan) -> RequestPlan:
    """Recompute the last token of a plan where it is stored: its logits give the first new token.

    Raises:
        PromptError: The plan has no token.
    """
    if not plan.num_tokens:
        raise PromptError("the prompt has no token; give it text, or import a module that has some")
    *parts, last = (part for part in plan.parts if part.token_ids)
    if isinstance(last, Cached):
        leading, end = split_cached(last, len(last.token_ids) - 1)
        if end is not None:
            tail = (leading, _recomputed(end))
            return RequestPlan((*parts, *(part for part in tail if part is not None)))
    elif isinstance(last, Reused):
        cut = last.span.end - 1
        end_span = Span(cut, last.span.end)
        kept = replace(last, token_ids=last.token_ids[:-1], span=Span(last.span.start, cut))
        fresh = Fresh(token_ids=last.token_ids[-1:], span=end_span, kind=FreshKind.REPAIR)
        return RequestPlan((*parts, *((kept,) if kept.token_ids else ()), fresh))
    return plan


def _recomputed(part: Cached) -> Fresh:
    return Fresh(
        token_ids=part.token_ids,
        span=part.span,
        kind=FreshKind.REPAIR,
        label=part.label,
        occurrence=part.occurrence,
    )
