"""Limits that keep statistics in bounded memory."""

from __future__ import annotations

from pc_rag.errors import ConfigError


def check_limits(owner: str, **limits: int) -> None:
    """Refuse limits under which nothing would be kept.

    Args:
        owner: Name of the class whose arguments they are, for the message.
        limits: The limits by argument.

    Raises:
        ConfigError: A limit is below 1.
    """
    for name, limit in limits.items():
        if limit < 1:
            raise ConfigError(f"{owner}: {name} is {limit}; it must be at least 1")
