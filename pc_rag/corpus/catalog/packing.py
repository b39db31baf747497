"""Token ids to bytes and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pc_rag.types import TokenIds


def pack_token_ids(token_ids: TokenIds) -> bytes:
    """Little-endian int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_token_ids(data: bytes) -> TokenIds:
    """The token ids that ``pack_token_ids`` packed."""
    return tuple(np.frombuffer(data, dtype="<i4").tolist())
