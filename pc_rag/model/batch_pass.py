"""One forward pass of several sequences side by side, each attending its own KV and what is shared.

The pass is one row of tokens, ``[1, num_tokens]``: for everything but attention they are one long
sequence, without padding. Attention goes piece by piece and is merged by log-sum-exp, as that of a
single request is (see ``attention``). A piece of stored KV that several sequences see is read once
per layer, by the stacked queries of all of them:

              module A   module B   own
    s0 t0        x                  s0              x = attended, in place
    s0 t1        x                  s0 s0
    s1 t0        x          x       s1              own = fresh tokens, or the sequence's tail
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from pc_rag.model.batch_own import NextTokens, PromptTokens
from pc_rag.model.batch_pieces import PieceUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.batch_kv import BatchSequence, StoredPiece
    from pc_rag.model.batch_own import OwnKV
    from pc_rag.model.batch_pieces import Rotations


class BatchPass:
    """One forward pass of several sequences; shared by its layers, as an ``AttentionPass`` is.

    Args:
        own: What the tokens see of their own sequences.
        uses: The stored pieces that are seen.

    Attributes:
        num_layers_served: Layers that attended through this pass so far.
    """

    def __init__(self, own: OwnKV, uses: Sequence[PieceUse]) -> None:
        self._own = own
        self._uses = uses
        self._lse: torch.Tensor | None = None
        self.num_layers_served = 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,  # noqa: ARG002
        sinks: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Store the layer's fresh KV and attend everything that each token may see.

        Args:
            layer: Index of the layer.
            queries: ``[1, num_heads, num_tokens, head_dim]``, position-encoded.
            keys: ``[1, num_kv_heads, num_tokens, head_dim]``, position-encoded.
            values: As ``keys``.
            scaling: Factor on the scores.
            softcap: Not applied yet.
            sinks: Alike.

        Returns:
            ``[1, num_heads, num_tokens, value_dim]`` in the dtype of ``queries``.
        """
        self.num_layers_served += 1
        num_tokens, num_kv_heads = queries.shape[2], keys.shape[1]
        group_size = queries.shape[1] // num_kv_heads
        if self._lse is None:  # a token that does not see a piece keeps minus infinity there
            lead = (len(self._uses) + 1, num_tokens, num_kv_heads, group_size)
            self._lse = queries.new_full(lead, float("-inf"), dtype=torch.float32)
        own = queries.new_empty((num_tokens, num_kv_heads, group_size, values.shape[-1]))
        self._own.attend(layer, queries, keys, values, out=own, lse=self._lse[-1], scaling=scaling)
        if not self._uses:
            return own.flatten(1, 2).transpose(0, 1)[None]
        stacked = torch.unflatten(queries[0].transpose(0, 1), 1, (num_kv_heads, group_size))
        outs = []
        for number, use in enumerate(self._uses):
            out, self._lse[number, use.tokens] = use.attend(layer, stacked, scaling)
            outs.append(out)
        weights = torch.softmax(self._lse, 0)[..., None]
        total = own * weights[-1]
        for use, out, weight in zip(self._uses, outs, weights[:-1], strict=True):
            use.add(total, out, weight)
        return total.flatten(1, 2).transpose(0, 1)[None].to(queries.dtype)

    def commit(self) -> None:
        """Count the rows that the pass has filled; to be called once it has succeeded."""
        self._own.commit()


def prefill_pass(sequences: Sequence[BatchSequence], rotations: Rotations) -> BatchPass:
    """The pass of all fresh tokens of some prompts, one prompt behind the other."""
    tokens: list[slice] = []
    end = 0
    for sequence in sequences:
        tokens.append(slice(end, end + len(sequence.token_ids)))
        end = tokens[-1].stop
    own = PromptTokens([sequence.tail for sequence in sequences], tokens)
    uses = _shared_uses(sequences, tokens, rotations)
    for sequence, of_sequence in zip(sequences, tokens, strict=True):
        uses += _settled_uses(sequence, of_sequence, rotations)
    return BatchPass(own, uses)


def decode_pass(
    sequences: Sequence[BatchSequence], rotations: Rotations, dtype: torch.dtype
) -> BatchPass:
    """The pass of one token of every sequence; sequences in the order of ``in_place_order``."""
    own = NextTokens([sequence.tail for sequence in sequences], dtype)
    tokens = [slice(number, number + 1) for number in range(len(sequences))]
    return BatchPass(own, _shared_uses(sequences, tokens, rotations, is_prompt=False))


def _shared_uses(
    sequences: Sequence[BatchSequence],
    tokens: Sequence[slice],
    rotations: Rotations,
    *,
    is_prompt: bool = True,
) -> list[PieceUse]:
    """Every shared piece, with the tokens that see it; tokens behind a prompt see all."""
    seen: dict[StoredPiece, list[tuple[slice, int]]] = {}
    for sequence, of_sequence in zip(sequences, tokens, strict=True):
        for view in sequence.shared:
            seeing = _from(sequence, of_sequence, view.start) if is_prompt else of_sequence
            if seeing.start < seeing.stop:
                seen.setdefault(view.piece, []).append((seeing, view.shift))
    return [
        PieceUse(piece.layer_keys, piece.layer_values, places, rotations, _device(piece))
        for piece, places in seen.items()
    ]


def _settled_uses(sequence: BatchSequence, tokens: slice, rotations: Rotations) -> list[PieceUse]:
    """What a prompt's fresh tokens see of its settled rows; neighbours are one piece."""
    ends: dict[int, slice] = {}
    for settled in sequence.settled:
        first = _from(sequence, tokens, settled.start).start
        if first < tokens.stop:
            before = ends.get(first, settled.rows)
            ends[first] = slice(before.start, settled.rows.stop)
    uses = []
    for first, rows in ends.items():
        block, slots = sequence.tail.block, slice(sequence.tail.slot, sequence.tail.slot + 1)
        keys = block.keys[:, slots, :, rows].unbind(0)
        values = block.values[:, slots, :, rows].unbind(0)
        seen = [(slice(first, tokens.stop), 0)]
        uses.append(PieceUse(keys, values, seen, rotations, block.keys.device))
    return uses


def _from(sequence: BatchSequence, tokens: slice, start: int) -> slice:
    """The tokens of a prompt whose position ID is at least ``start``."""
    return slice(tokens.start + bisect_left(sequence.position_ids, start), tokens.stop)


def _device(piece: StoredPiece) -> torch.device:
    return piece.layer_keys[0].device
