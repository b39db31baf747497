"""The stored KV of one module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.errors import StoreError

if TYPE_CHECKING:
    import torch

    from pc_rag.kv.key import EntryAddress


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Keys and values of one module, immutable.

    Keys are stored as the model caches them: after the position encoding, at the span the module
    was encoded at.

    Attributes:
        address: What names it, token ids included.
        keys: ``[num_layers, num_kv_heads, num_tokens, head_dim]``, of the address's dtype.
        values: ``[num_layers, num_kv_heads, num_tokens, head_dim]``, of the address's dtype.

    Raises:
        StoreError: The tensors do not hold exactly the address's tokens, or are of another dtype.
    """

    address: EntryAddress
    keys: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        expected = len(self.address.token_ids)
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor.ndim != 4 or tensor.shape[2] != expected:  # noqa: PLR2004 - the four axes above
                raise StoreError(
                    f"entry {self.address.key[:12]}: {name} have shape {tuple(tensor.shape)}; "
                    f"expected [num_layers, num_kv_heads, {expected}, head_dim] for the "
                    f"{expected} tokens of its address"
                )
            if str(tensor.dtype) != f"torch.{self.address.dtype.value}":
                raise StoreError(
                    f"entry {self.address.key[:12]}: {name} are {tensor.dtype}; its address says "
                    f"{self.address.dtype.value}: convert them before they are stored"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it holds."""
        return len(self.address.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes
