"""The KV that a caller gives to the exact prefix cache: checked, and copied piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pc_rag.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.kv.prefix_match import Run, Symbol
    from pc_rag.types import Span


def check_runs(runs: Sequence[Run], *, symbols: Sequence[Symbol], positions: Sequence[int]) -> None:
    """Compare runs with the prompt they are said to be of, and with each other.

    Raises:
        StoreError: A run covers a chunk, or its tokens have other positions than the prompt gives
            them, or two runs differ in more than the number of tokens.
    """
    for run in runs:
        first, last = run.symbols.start, run.symbols.end
        expected = list(range(run.start, run.start + run.num_tokens))
        if last > len(symbols) or list(positions[first:last]) != expected:
            raise StoreError(
                f"prefix cache: a run of symbols {first} to {last} starts at position ID "
                f"{run.start}; the prompt of {len(symbols)} symbols puts them elsewhere"
            )
        if any(isinstance(symbol, str) for symbol in symbols[first:last]):
            raise StoreError(
                f"prefix cache: a run of symbols {first} to {last} covers a chunk, whose KV "
                f"belongs into the store"
            )
        for found, first_one in ((run.keys, runs[0].keys), (run.values, runs[0].values)):
            if _form(found) != _form(first_one):
                raise StoreError(
                    f"prefix cache: runs of one prompt are {_form(first_one)} and {_form(found)}; "
                    f"only the number of tokens may differ"
                )


def check_covered(pieces: Sequence[Span], runs: Sequence[Run]) -> None:
    """Look for a run for every symbol of the pieces.

    Raises:
        StoreError: A symbol is in no run.
    """
    for piece in pieces:
        end = _covered_end(piece, runs)
        if end < piece.end:
            raise StoreError(
                f"prefix cache: symbol {end} is not in the tree and no run covers it; give the KV "
                f"of every token behind the matched ones"
            )


def piece_bytes(piece: Span, runs: Sequence[Run]) -> int:
    """Bytes of keys and values that a copy of the piece takes."""
    tensors = (runs[0].keys, runs[0].values)
    per_token = sum(
        tensor.shape[0] * tensor.shape[1] * tensor.shape[3] * tensor.element_size()
        for tensor in tensors
    )
    return per_token * len(piece)


def copy_piece(piece: Span, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a piece that the runs cover, contiguous and owned by the caller.

    Returns:
        Two tensors ``[num_layers, num_kv_heads, num_tokens, head_dim]``.
    """
    keys = _empty_like(runs[0].keys, len(piece))
    values = _empty_like(runs[0].values, len(piece))
    for run in runs:
        first = max(piece.start, run.symbols.start)
        last = min(piece.end, run.symbols.end)
        if first < last:
            target = slice(first - piece.start, last - piece.start)
            source = slice(first - run.symbols.start, last - run.symbols.start)
            keys[:, :, target].copy_(run.keys[:, :, source])
            values[:, :, target].copy_(run.values[:, :, source])
    return keys, values


def _covered_end(piece: Span, runs: Sequence[Run]) -> int:
    """The first symbol of the piece that no run covers, or its end."""
    end = piece.start
    for run in sorted(runs, key=lambda run: run.symbols):
        if run.symbols.start <= end < run.symbols.end:
            end = run.symbols.end
    return min(end, piece.end)


def _empty_like(tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    num_layers, num_kv_heads, _, head_dim = tensor.shape
    shape = (num_layers, num_kv_heads, num_tokens, head_dim)
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def _form(tensor: torch.Tensor) -> tuple[int, int, int, torch.dtype, torch.device]:
    """All of a tensor's form but the number of its tokens."""
    num_layers, num_kv_heads, _, head_dim = tensor.shape
    return num_layers, num_kv_heads, head_dim, tensor.dtype, tensor.device
