"""Preallocated request buffers: a request takes one, fills it in place, and gives it back."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from pc_rag.model.attention.kv_view import Tail

_ROW_GRANULE = 256
"""Capacities are rounded up to this many rows, so that buffers of similar requests are shared."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV geometry of one model.

    Attributes:
        num_layers: Layers that keep keys and values.
        num_kv_heads: Key/value heads per layer.
        key_dim: Channels of a key head.
        value_dim: Channels of a value head.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values over all layers."""
        channels = self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)
        return channels * dtype.itemsize


class BufferPool:
    """Buffers of one model, kept for the next request up to a byte limit. Thread-safe.

    Args:
        shape: Geometry of the model's KV.
        dtype: Compute dtype.
        device: Where buffers lie.
        capacity_bytes: Most bytes that idle buffers may occupy; larger ones are freed at once.
    """

    def __init__(
        self, shape: KVShape, *, dtype: torch.dtype, device: torch.device, capacity_bytes: int
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._capacity_bytes = capacity_bytes
        self._idle: list[Tail] = []  # the longest idle first
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that wait for a request."""
        return sum(map(_num_bytes, self._idle))

    def take(self, num_rows: int, *, batch_size: int = 1) -> Tail:
        """An empty buffer with room for at least ``num_rows`` tokens per sequence."""
        capacity = -(-max(num_rows, 1) // _ROW_GRANULE) * _ROW_GRANULE
        with self._lock:
            fitting = self._fitting(batch_size, capacity)
            if fitting is not None:
                return self._idle.pop(fitting)
        layers, heads = self._shape.num_layers, self._shape.num_kv_heads
        lead = (layers, batch_size, heads, capacity)
        return Tail(
            torch.empty((*lead, self._shape.key_dim), dtype=self._dtype, device=self._device),
            torch.empty((*lead, self._shape.value_dim), dtype=self._dtype, device=self._device),
        )

    def give_back(self, tail: Tail) -> None:
        """Return a buffer; the caller must not use it any more.

        Where the limit is passed, the buffers that were idle longest are freed.
        """
        with self._lock:
            self._idle.append(Tail(tail.keys, tail.values))
            while self.idle_bytes > self._capacity_bytes:
                del self._idle[0]

    def _fitting(self, batch_size: int, capacity: int) -> int | None:
        """Index of the idle buffer that fits best; it is at most twice as long as asked for."""
        candidates = [
            (tail.capacity, index)
            for index, tail in enumerate(self._idle)
            if tail.keys.shape[1] == batch_size and capacity <= tail.capacity <= 2 * capacity
        ]
        return min(candidates)[1] if candidates else None


def _num_bytes(tail: Tail) -> int:
    return tail.keys.nbytes + tail.values.nbytes
