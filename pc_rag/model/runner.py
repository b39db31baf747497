"""Forward passes over stored KV: one for all fresh tokens of a request, then one per new token."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import GenerationError, ModelError
from pc_rag.model.attention.attention_pass import AttentionPass
from pc_rag.model.attention_modules import own_attention_of
from pc_rag.model.buffer_pool import BufferPool
from pc_rag.model.hf_attention import own_attention
from pc_rag.model.positions.frozen_rope import held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pc_rag.model.attention.kv_view import KVView
    from pc_rag.model.attention_modules import RunningPass
    from pc_rag.model.buffer_pool import KVShape
    from pc_rag.model.positions import ModelPositions
    from pc_rag.model.positions.frozen_rope import FrozenRope

_DEFAULT_POOL_BYTES = 1 << 30


class Runner:
    """Runs one model over views. Thread-safe: forward passes take turns, requests interleave.

    Args:
        model: A causal language model of transformers, in evaluation mode. Lent, not owned: its
            attention is replaced during a forward pass only.
        positions: How its layers tell positions apart; see ``detect.runner_of``.
        shape: The geometry of its KV, alike.
        frozen: Its rotary frequencies, where they would change with the prompt's length.
        pool_bytes: Most bytes that idle request buffers may keep.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - transformers is untyped here
        positions: ModelPositions,
        shape: KVShape,
        *,
        frozen: FrozenRope | None = None,
        pool_bytes: int = _DEFAULT_POOL_BYTES,
    ) -> None:
        self._model = model
        self.positions = positions
        self.shape = shape
        self._frozen = frozen
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.pool = BufferPool(
            self.shape, dtype=self.dtype, device=self.device, capacity_bytes=pool_bytes
        )

    def prefill(
        self, view: KVView, token_ids: Sequence[int], position_ids: Sequence[int]
    ) -> torch.Tensor:
        """Compute all fresh tokens of a request in one forward pass.

        Args:
            view: What they attend; its tail receives their KV.
            token_ids: The fresh tokens, by rising position ID.
            position_ids: Their position IDs; gaps are where stored KV stands.

        Returns:
            Logits behind the last token, ``[vocab_size]``, float32.

        Raises:
            GenerationError: There is no token, or the view's buffer is too small.
        """
        if not token_ids:
            raise GenerationError("a forward pass needs at least one fresh token; got none")
        logits = self._forward(
            view, torch.tensor([token_ids]), list(position_ids), with_logits=True
        )
        return logits[0, 0].float()

    def decode(self, view: KVView, token_id: int, position_id: int) -> torch.Tensor:
        """Compute one generated token; logits behind it, ``[vocab_size]``, float32."""
        return self.prefill(view, (token_id,), (position_id,))

    def compute(self, view: KVView, token_ids: torch.Tensor, position_ids: Sequence[int]) -> None:
        """Compute the KV of a batch that shares what it attends; logits are not formed.

        Args:
            view: What every sequence attends; its tail receives their KV.
            token_ids: ``[batch_size, num_tokens]``; shorter sequences are padded at their end.
            position_ids: Of every sequence alike, ``num_tokens`` of them, rising.
        """
        self._forward(view, token_ids, list(position_ids), with_logits=False)

    def settle(self, view: KVView, num_more_tokens: int) -> None:
        """Let a view read no stored KV any more: copy it to a contiguous buffer of its own.

        Args:
            view: Its later tokens must stand behind everything it holds.
            num_more_tokens: Tokens that will still be computed.
        """
        into = self.pool.take(view.num_stored + view.tail.num_rows + num_more_tokens)
        with torch.inference_mode():
            former = view.settle(into, self.positions)
        self.pool.give_back(former)

    def run_pass(
        self,
        running: RunningPass,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        logits_behind: torch.Tensor | None,
    ) -> torch.Tensor:
        """One forward pass of tokens that attend through ``running``.

        Args:
            running: What they attend. It takes their KV, but counts no rows.
            token_ids: ``[batch_size, num_tokens]``, on any device.
            position_ids: ``[1, num_tokens]``, alike.
            logits_behind: Indices of the tokens behind which logits are wanted; ``None`` where
                they are not formed at all.

        Returns:
            ``[batch_size, num_logits, vocab_size]`` in the model's dtype.

        Raises:
            ModelError: The model is in training mode, or some of its layers do not attend through
                pc-rag.
        """
        if self._model.training:
            raise ModelError(
                f"{type(self._model).__name__} is in training mode: its dropout would be stored; "
                "call model.eval()"
            )
        arguments = self._arguments(token_ids.to(self.device), position_ids.to(self.device))
        with torch.inference_mode(), own_attention(self._model, running), held(self._frozen):
            if logits_behind is not None:
                logits = _logits(self._model, arguments, logits_behind.to(self.device))
            else:
                self._model.base_model(**arguments)
                logits = torch.empty(0)
        if running.num_layers_served != self.shape.num_layers:
            raise ModelError(
                f"{type(self._model).__name__}: {running.num_layers_served} of "
                f"{self.shape.num_layers} layers attended through pc-rag; the KV of the others is "
                "missing. Its attention code neither calls transformers' attention interface nor "
                "is known to pc-rag, or its layers do not share one configuration: use another "
                "model, or update transformers"
            )
        return logits

    def _arguments(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        """What the model is called with."""
        arguments: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
        own = own_attention_of(self._model)
        if own is None or own.takes_positions:
            arguments["position_ids"] = position_ids
        if own is not None and own.takes_mask:
            batch_size, num_tokens = token_ids.shape
            nothing = torch.zeros((), dtype=self.dtype, device=self.device)
            arguments["attention_mask"] = nothing.expand(batch_size, 1, num_tokens, num_tokens)
        return arguments

    def _forward(
        self, view: KVView, token_ids: torch.Tensor, position_ids: list[int], *, with_logits: bool
    ) -> torch.Tensor:
        num_tokens = token_ids.shape[1]
        view.tail.reserve(num_tokens)
        logits = self.run_pass(
            AttentionPass(view, self.positions, position_ids),
            token_ids,
            torch.tensor([position_ids]),
            logits_behind=torch.tensor([num_tokens - 1]) if with_logits else None,
        )
        view.tail.num_rows += num_tokens
        return logits


def _logits(model: Any, arguments: dict[str, Any], kept: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - transformers is untyped here
    """Logits behind the tokens ``kept``, ``[batch_size, num_kept, vocab_size]``; no others' formed.

    Where the model cannot be asked for some, its head is given their rows only: whatever it does
    to logits afterwards (capping, scaling) it does to these.
    """
    if _takes_logits_to_keep(type(model).forward):
        logits: torch.Tensor = model(**arguments, logits_to_keep=kept, return_dict=True).logits
    else:
        with _rows_only(model.get_output_embeddings(), kept):
            logits = model(**arguments, return_dict=True).logits
    if logits.shape[1] != len(kept):
        raise ModelError(
            f"{type(model).__name__} gave {logits.shape[1]} rows of logits where {len(kept)} were "
            "asked for; its code takes no logits_to_keep and does not call its output embeddings. "
            "Use another model, or update transformers"
        )
    return logits


@cache  # reading a signature takes longer than some layers do
def _takes_logits_to_keep(forward: Callable[..., Any]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters


@contextmanager
def _rows_only(head: torch.nn.Module, kept: torch.Tensor) -> Iterator[None]:
    def keep(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs[0][:, kept], *inputs[1:]

    handle = head.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
