"""How many position IDs a model can take."""

from __future__ import annotations

from typing import Any

from pc_rag.errors import ConfigError, UnsupportedModelError
from pc_rag.model.positions.frozen_rope import original_max_position, rope_kinds

_LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "n_ctx")
"""Where configurations name the length that a model was trained for; the first that is set."""
FEWEST_POSITIONS = 4
"""Position IDs that a model must have to be seen at two starts and compared with itself."""
_BLOOM_LENGTH = 2048
"""What the BLOOM models were trained with; their configurations need not say so."""


def position_limit(config: Any, asked: int | None = None, *, architecture: str = "") -> int:  # noqa: ANN401 - configurations share no useful type
    """Position IDs that requests of a model may use.

    Rotations and tables end where the configuration says. With LongRoPE the short factors serve
    ``original_max_position_embeddings``, and asking for more takes the long factors. ALiBi has no
    end of its own: by default what the model was trained with, and more where it is asked for.

    Args:
        config: The model's configuration.
        asked: A limit by the user; ``None`` for the model's own.
        architecture: What messages call the model; by default what its configuration says.

    Raises:
        UnsupportedModelError: Neither the configuration nor the user says, or the model has fewer
            than ``FEWEST_POSITIONS``.
        ConfigError: More is asked for than the model can take, or fewer than those.
    """
    names = getattr(config, "architectures", None) or (type(config).__name__,)
    architecture = architecture or str(names[0])
    if asked is not None and asked < FEWEST_POSITIONS:
        raise ConfigError(f"max_position must be at least {FEWEST_POSITIONS}; got {asked}")
    named = named_limit(config)
    if named is None and asked is None:
        raise UnsupportedModelError(
            f"{architecture} is not supported: its configuration names no length "
            "(max_position_embeddings). Add it to config.json, the number of positions the model "
            "was trained for, or pass max_position",
            architecture,
            "context length",
        )
    if named is not None and named < FEWEST_POSITIONS:
        raise UnsupportedModelError(
            f"{architecture} is not supported: its configuration names a length of {named} "
            f"position IDs. Prompt caching needs at least {FEWEST_POSITIONS}; set "
            "max_position_embeddings in config.json as the model was trained",
            architecture,
            "context length",
        )
    if asked is None:
        original = original_max_position(config)
        return min(named or 0, original) if original else named or 0
    if is_bounded(config):
        check_within(named, asked, architecture)
    return asked


def check_within(named: int | None, asked: int | None, architecture: str) -> None:
    """Refuse a limit beyond the positions that a model's encoding was made for.

    Args:
        named: Position IDs that it was made for; ``None`` where that is not known.
        asked: By the user.
        architecture: For the message.

    Raises:
        ConfigError: More is asked for.
    """
    if named is not None and asked is not None and asked > named:
        raise ConfigError(
            f"max_position {asked} is more than the {named} position IDs that {architecture} was "
            f"made for; pass at most {named}, or change max_position_embeddings in config.json "
            "together with its RoPE scaling"
        )


def named_limit(config: Any) -> int | None:  # noqa: ANN401 - as above
    """The length that a configuration names; ``None`` where it names none."""
    for field in _LENGTH_FIELDS:
        value = getattr(config, field, None)
        if value:
            return int(value)
    return _BLOOM_LENGTH if config.model_type == "bloom" else None


def is_bounded(config: Any) -> bool:  # noqa: ANN401 - as above
    """Whether position IDs beyond the named length have no meaning to the model."""
    return bool(rope_kinds(config)) and not getattr(config, "alibi", False)
