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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pc_rag.model.attention.kernels import Scoring, check_heads, weigh_sinks
from pc_rag.model.attention.layer_sights import LayerSights
from pc_rag.model.batch.own import NextTokens, PromptTokens
from pc_rag.model.batch.pieces import PieceUse, Seeing, SeenPiece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.batch.kv import BatchSequence, StoredPiece
    from pc_rag.model.batch.own import OwnKV
    from pc_rag.model.batch.pieces import Rotations
    from pc_rag.model.positions import LayerAttention


@dataclass(slots=True, eq=False)
class _Kind:
    """What the layers of one kind attend.

    Attributes:
        sights: Of the layers.
        uses: The stored pieces that some token sees.
        lse: Log-sum-exp by piece, that of own tokens behind them, then sinks.
    """

    sights: LayerSights
    uses: list[PieceUse]
    lse: torch.Tensor


class BatchPass:
    """One forward pass of several sequences; shared by its layers, as an ``AttentionPass`` is.

    Args:
        own: What the tokens see of their own sequences.
        pieces: Stored pieces, and who stands behind each.
        position_ids: Of all tokens.
        rotations: Of the batch.

    Attributes:
        num_layers_served: Layers that attended through this pass so far.
    """

    def __init__(
        self,
        own: OwnKV,
        pieces: Sequence[SeenPiece],
        position_ids: Sequence[int],
        rotations: Rotations,
    ) -> None:
        self._own = own
        self._pieces = pieces
        self._position_ids = position_ids
        self._rotations = rotations
        self._kinds: dict[LayerAttention, _Kind] = {}
        self.num_layers_served = 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the layer's fresh KV and attend everything that each token may see.

        Args:
            layer: Index of the layer.
            queries: ``[1, num_heads, num_tokens, head_dim]``, position-encoded.
            keys: ``[1, num_kv_heads, num_tokens, head_dim]``, position-encoded.
            values: ``[1, num_kv_heads, num_tokens, value_dim]``.
            scaling: Factor on the scores.
            softcap: See ``Scoring``.
            sinks: Alike.

        Returns:
            ``[1, num_heads, num_tokens, value_dim]`` in the dtype of ``queries``.

        Raises:
            ModelError: The layer has other KV heads than the tails.
        """
        check_heads(layer, queries, keys, self._own.num_kv_heads)
        self.num_layers_served += 1
        num_tokens, num_kv_heads = queries.shape[2], keys.shape[1]
        group_size = queries.shape[1] // num_kv_heads
        scoring = Scoring(scaling, softcap, sinks)
        kind = self._kind(layer, queries, group_size, has_sinks=sinks is not None)
        uses, lse = kind.uses, kind.lse
        own = queries.new_empty((num_tokens, num_kv_heads, group_size, values.shape[-1]))
        own_lse = lse[len(uses)]
        self._own.attend(
            layer, queries, keys, values,
            out=own, lse=own_lse, scoring=scoring, sights=kind.sights,
        )  # fmt: skip
        by_head = None if sinks is None else sinks.reshape(num_kv_heads, group_size)
        if not uses:
            merged = own if by_head is None else weigh_sinks(own, own_lse, by_head)
            return merged.flatten(1, 2).transpose(0, 1)[None]
        stacked = torch.unflatten(queries[0].transpose(0, 1), 1, (num_kv_heads, group_size))
        outs = []
        for number, use in enumerate(uses):
            out, lse[number, use.tokens] = use.attend(layer, stacked, scoring)
            outs.append(out)
        if by_head is not None:
            lse[-1] = by_head
        weights = torch.softmax(lse, 0)[..., None]
        total = own * weights[len(uses)]
        for use, out, weight in zip(uses, outs, weights[: len(uses)], strict=True):
            use.add(total, out, weight)
        return total.flatten(1, 2).transpose(0, 1)[None].to(queries.dtype)

    def _kind(
        self, layer: int, queries: torch.Tensor, group_size: int, *, has_sinks: bool
    ) -> _Kind:
        """What the layer attends; like layers share it."""
        of_layer = self._rotations.positions.layers[layer]
        if of_layer not in self._kinds:
            sights = LayerSights.of(
                of_layer,
                reach=max(self._position_ids) + 1,  # position IDs are not negative
                group_size=group_size,
                device=queries.device,
            )
            seen = (
                (piece, piece.within(sights.window, self._position_ids)) for piece in self._pieces
            )
            uses = [
                PieceUse(
                    piece, seeing, self._position_ids,
                    encoding=of_layer.encoding, rotations=self._rotations, sights=sights,
                )
                for piece, seeing in seen
                if seeing
            ]  # fmt: skip
            # A token that does not see a piece keeps minus infinity there.
            lead = (len(uses) + 1 + has_sinks, queries.shape[2])
            shape = (*lead, queries.shape[1] // group_size, group_size)
            lse = queries.new_full(shape, float("-inf"), dtype=torch.float32)
            self._kinds[of_layer] = _Kind(sights, uses, lse)
        return self._kinds[of_layer]

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
    position_ids = [p for sequence in sequences for p in sequence.position_ids]
    own = PromptTokens([sequence.tail for sequence in sequences], tokens, position_ids)
    pieces = _shared_pieces(sequences, tokens)
    for sequence, of_sequence in zip(sequences, tokens, strict=True):
        pieces += _settled_pieces(sequence, of_sequence)
    return BatchPass(own, pieces, position_ids, rotations)


def decode_pass(
    sequences: Sequence[BatchSequence],
    position_ids: Sequence[int],
    rotations: Rotations,
    dtype: torch.dtype,
) -> BatchPass:
    """The pass of one token of every sequence; sequences in the order of ``in_place_order``."""
    own = NextTokens([sequence.tail for sequence in sequences], position_ids, dtype)
    tokens = [slice(number, number + 1) for number in range(len(sequences))]
    pieces = _shared_pieces(sequences, tokens, is_prompt=False)
    return BatchPass(own, pieces, position_ids, rotations)


def _shared_pieces(
    sequences: Sequence[BatchSequence], tokens: Sequence[slice], *, is_prompt: bool = True
) -> list[SeenPiece]:
    """Every shared piece, with the tokens behind it; tokens behind a prompt see all."""
    seen: dict[StoredPiece, list[Seeing]] = {}
    for sequence, of_sequence in zip(sequences, tokens, strict=True):
        for view in sequence.shared:
            seeing = _from(sequence, of_sequence, view.start) if is_prompt else of_sequence
            if seeing.start < seeing.stop:
                found = Seeing(seeing, view.shift, view.start)
                seen.setdefault(view.piece, []).append(found)
    return [
        SeenPiece(
            piece.layer_keys,
            piece.layer_values,
            torch.arange(piece.layer_keys[0].shape[2]),
            seeing,
        )
        for piece, seeing in seen.items()
    ]


def _settled_pieces(sequence: BatchSequence, tokens: slice) -> list[SeenPiece]:
    """What a prompt's fresh tokens see of its settled rows; neighbours are one piece."""
    ends: dict[int, slice] = {}
    for settled in sequence.settled:
        first = _from(sequence, tokens, settled.start).start
        if first < tokens.stop:
            before = ends.get(first, settled.rows)
            ends[first] = slice(before.start, settled.rows.stop)
    pieces = []
    for first, rows in ends.items():
        block, slots = sequence.tail.block, slice(sequence.tail.slot, sequence.tail.slot + 1)
        keys = block.keys[:, slots, :, rows].unbind(0)
        values = block.values[:, slots, :, rows].unbind(0)
        seen = [Seeing(slice(first, tokens.stop))]
        pieces.append(SeenPiece(keys, values, sequence.tail.position_ids[rows], seen))
    return pieces


def _from(sequence: BatchSequence, tokens: slice, start: int) -> slice:
    """The tokens of a prompt whose position ID is at least ``start``."""
    return slice(tokens.start + bisect_left(sequence.position_ids, start), tokens.stop)
