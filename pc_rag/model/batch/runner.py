"""Forward passes of a batch: its prompts side by side, then one token of every sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pc_rag.model.batch.batch_pass import decode_pass, prefill_pass
from pc_rag.model.batch.own import in_place_order
from pc_rag.model.batch.pieces import Rotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.batch.kv import BatchSequence
    from pc_rag.model.runner import Runner


class BatchRunner:
    """Runs the sequences of one batch. Other requests of the runner come in between passes.

    Args:
        runner: The model.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._rotations = Rotations(runner.positions)

    def prefill(self, sequences: Sequence[BatchSequence]) -> torch.Tensor:
        """Compute all fresh tokens of some prompts in one forward pass.

        Args:
            sequences: Nothing of them was computed yet; each has a fresh token, and room.

        Returns:
            Logits behind each prompt, ``[num_sequences, vocab_size]``, float32.
        """
        counts = torch.tensor([len(sequence.token_ids) for sequence in sequences])
        running = prefill_pass(sequences, self._rotations)
        logits = self._runner.run_pass(
            running,
            torch.tensor([[i for sequence in sequences for i in sequence.token_ids]]),
            torch.tensor([[i for sequence in sequences for i in sequence.position_ids]]),
            logits_behind=counts.cumsum(0) - 1,
        )
        running.commit()
        return logits[0].float()

    def decode(
        self,
        sequences: Sequence[BatchSequence],
        token_ids: Sequence[int],
        position_ids: Sequence[int],
    ) -> torch.Tensor:
        """Compute one generated token of every sequence.

        Args:
            sequences: Their prompts were computed, and they have room.
            token_ids: One for each.
            position_ids: Alike.

        Returns:
            Logits behind the tokens, ``[num_sequences, vocab_size]``, float32.
        """
        order = in_place_order([sequence.tail for sequence in sequences])
        ordered_ids = [position_ids[n] for n in order]
        running = decode_pass(
            [sequences[n] for n in order], ordered_ids, self._rotations, self._runner.dtype
        )
        logits = self._runner.run_pass(
            running,
            torch.tensor([[token_ids[n] for n in order]]),
            torch.tensor([ordered_ids]),
            logits_behind=torch.arange(len(order)),
        )
        running.commit()
        ordered = torch.empty_like(logits[0], dtype=torch.float32)
        ordered[torch.tensor(order, device=logits.device)] = logits[0].float()
        return ordered
