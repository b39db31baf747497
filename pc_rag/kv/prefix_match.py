"""What the exact prefix cache takes and hands out: runs of KV, and leases on matched ones."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Self, TypeAlias

from pc_rag.errors import StoreError
from pc_rag.types import ModuleKey, Span

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch

Symbol: TypeAlias = int | ModuleKey
"""One step of a prompt: a token id, or the key of a composed chunk whose KV lies in the store."""

_NUM_AXES = 4
_TOKEN_AXIS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """KV of tokens at consecutive position IDs.

    Attributes:
        keys: ``[num_layers, num_kv_heads, num_tokens, head_dim]``.
        values: ``[num_layers, num_kv_heads, num_tokens, head_dim]``.
        start: Position ID of the first token.
        symbols: Which symbols of the prompt they are; each of them a token.

    Raises:
        StoreError: The tensors hold another number of tokens than ``symbols``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    symbols: Span

    def __post_init__(self) -> None:
        expected = len(self.symbols)
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor.ndim != _NUM_AXES or tensor.shape[_TOKEN_AXIS] != expected:
                raise StoreError(
                    f"run of symbols {self.symbols.start} to {self.symbols.end}: {name} have shape "
                    f"{tuple(tensor.shape)}; expected [num_layers, num_kv_heads, {expected}, "
                    f"head_dim]"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens of the run."""
        return len(self.symbols)

    @property
    def span(self) -> Span:
        """Position IDs of the run."""
        return Span(self.start, self.start + len(self.symbols))


class PrefixMatch:
    """The longest leading run of a prompt that the cache holds, and a lease on it.

    Use it as a context manager, or call ``release`` when done; releasing twice is harmless.

    Args:
        num_symbols: Leading symbols that were matched.
        runs: Their KV, in order.
        on_release: Called once, when the lease is given back.
    """

    __slots__ = ("_lock", "_num_symbols", "_on_release", "_runs")

    def __init__(
        self, num_symbols: int, *, runs: tuple[Run, ...], on_release: Callable[[], None]
    ) -> None:
        self._num_symbols = num_symbols
        self._runs = runs
        self._on_release: Callable[[], None] | None = on_release
        self._lock = Lock()

    @property
    def num_symbols(self) -> int:
        """Leading symbols that were matched, tokens and composed chunks."""
        return self._num_symbols

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is here; the chunks' lies in the store."""
        return sum(run.num_tokens for run in self._runs)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The KV of the matched tokens, in order; views, not to be modified."""
        return self._runs

    def release(self) -> None:
        """Give the lease back; the runs must not be used any more."""
        with self._lock:
            on_release, self._on_release = self._on_release, None
            self._runs = ()
        if on_release is not None:
            on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """What a prefix cache holds and did.

    Attributes:
        num_nodes: Nodes of the tree.
        resident_bytes: Bytes of keys and values held, those still lent included.
        capacity_bytes: Limit on ``resident_bytes``.
        num_matches: Calls of ``match``.
        num_hits: Those that matched a token.
        num_reused_tokens: Tokens handed out.
        num_evictions: Nodes dropped to make room.
    """

    num_nodes: int
    resident_bytes: int
    capacity_bytes: int
    num_matches: int
    num_hits: int
    num_reused_tokens: int
    num_evictions: int
