"""The arguments of an import, checked against the parameters of its module."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from pc_rag.pml.names import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pc_rag.layout.schema_layout import ParameterLayout
    from pc_rag.layout.tokenize import TextEncoder
    from pc_rag.types import TokenIds

_NUM_NAMES_SHOWN = 10
_NUM_WITH_CLOSE_NAMES = 10
"""Unknown arguments of one import that are told what they may have meant: to look takes long."""


def check_arguments(
    parameters: Sequence[ParameterLayout],
    arguments: Mapping[str, str],
    encoder: TextEncoder,
    *,
    holder: str,
) -> tuple[dict[str, TokenIds], list[str]]:
    """Tokens for every parameter, and what is wrong with the arguments.

    Args:
        parameters: Those of one module, or of the schema.
        arguments: Texts by name.
        encoder: The one that the layout was made with.
        holder: The module or schema, for messages.

    Returns:
        By name the tokens that stand in for the parameter: of the argument, else of the default,
        filled up with spaces where the parameter wants that; none for what does not fit. Then
        a message for each problem.
    """
    found: dict[str, TokenIds] = {}
    problems: list[str] = []
    for layout in parameters:
        parameter = layout.parameter
        text = arguments.get(parameter.name)
        token_ids = layout.default_ids if text is None else encoder.encode_text(text)
        if token_ids is None:
            problems.append(
                f"parameter {parameter.name!r} of {holder} has no argument and no default; give it "
                f'one: {parameter.name}="..."'
            )
        elif len(token_ids) > parameter.max_tokens:
            problems.append(
                f"argument {parameter.name}={shorten(text or '')!r} of {holder} has "
                f"{len(token_ids)} tokens, the parameter holds {parameter.max_tokens}; shorten it "
                f"by {len(token_ids) - parameter.max_tokens}"
            )
            token_ids = None
        token_ids = token_ids or ()
        if parameter.pads_with_space:
            token_ids += (encoder.space_id(),) * (parameter.max_tokens - len(token_ids))
        found[parameter.name] = token_ids
    unknown = [name for name in arguments if name not in found]
    for number, name in enumerate(unknown):
        is_early = number < _NUM_WITH_CLOSE_NAMES
        problems.append(_unknown(name, list(found), holder, looks_for_close=is_early))
    return found, problems


def _unknown(name: str, names: list[str], holder: str, *, looks_for_close: bool) -> str:
    message = f"{holder} has no parameter {shorten(name)!r}"
    close = get_close_matches(name, names, n=1) if looks_for_close else []
    if close:
        return f"{message}; did you mean {close[0]!r}?"
    more = ", ..." if len(names) > _NUM_NAMES_SHOWN else ""
    return f"{message}; it has {', '.join(names[:_NUM_NAMES_SHOWN]) or 'none'}{more}"
