"""The slow truth: what a request's logits must be, computed by stock transformers only.

Nothing here uses the package's model room. Masks are dense, keys move in float64 by complex
multiplication, and every module is computed on its own. How stock models are made to follow
position IDs is in ``stock_attention``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from pc_rag.layout.plan import Fresh, RequestPlan
from tests.support.stock_attention import (
    attending,
    frequencies,
    has_latent_cache,
    has_learned_positions,
    is_interleaved,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Module:
    """How an entry was encoded: its tokens from ``start`` on, behind the attended context."""

    token_ids: tuple[int, ...]
    start: int
    context_ids: tuple[int, ...] = ()
    context_positions: tuple[int, ...] = ()


def full_logits(model: Any, token_ids: Sequence[int], position_ids: Sequence[int]) -> torch.Tensor:
    """Logits behind the last token of an ordinary causal prefill."""
    mask = _causal_by_position(position_ids, position_ids)
    return _forward(model, token_ids, position_ids, mask)[-1]


def masked_logits(model: Any, plan: RequestPlan, modules: Mapping[str, Module]) -> torch.Tensor:
    """One uncached forward pass under the mask that the visibilities define.

    Every entry is in it whole: rows that the plan does not read (placeholders, what repair
    recomputes) are seen by entries that attended them, and by no fresh token. Right where every
    entry lies where it was encoded, or attended itself only, and what an entry attended is read.
    """
    rows: list[_Row] = []
    for number, part in enumerate(plan.parts):
        if isinstance(part, Fresh):
            positions = range(part.span.start, part.span.end)
            pairs = zip(part.token_ids, positions, strict=True)
            rows += (_Row(token_id, position, number) for token_id, position in pairs)
    entries = {part.occurrence: modules[part.key] for part in plan.cached}
    for occurrence, module in entries.items():
        read = [part.span for part in plan.cached if part.occurrence == occurrence]
        for position, token_id in enumerate(module.token_ids, occurrence.start):
            is_read = any(span.start <= position < span.end for span in read)
            rows.append(_Row(token_id, position, occurrence, is_read=is_read))

    def sees(query: _Row, key: _Row) -> bool:
        if query.position < key.position:
            return False
        if query.owner not in entries:
            return key.is_read
        in_context = key.position in entries[query.owner].context_positions
        return key.owner == query.owner or (key.owner in entries and in_context)

    rows.sort(key=lambda row: row.position)
    mask = torch.tensor([[sees(query, key) for key in rows] for query in rows])
    logits = _forward(model, [r.token_id for r in rows], [r.position for r in rows], mask)
    return logits[max(index for index, row in enumerate(rows) if row.is_read)]


@dataclass(frozen=True)
class _Row:
    """One token of the masked pass: of a part, or of an entry at one place."""

    token_id: int
    position: int
    owner: Any
    is_read: bool = True


def assembled_logits(model: Any, plan: RequestPlan, modules: Mapping[str, Module]) -> torch.Tensor:
    """Each module alone at its encoded span, keys moved in float64, fresh tokens densely behind.

    Where positions are learned nothing can move: each module is encoded where it stands instead.
    """
    rows: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    positions: list[int] = []
    fresh_ids: list[int] = []
    fresh_positions: list[int] = []
    for part in plan.parts:
        part_positions = list(range(part.span.start, part.span.end))
        if isinstance(part, Fresh):
            fresh_ids += part.token_ids
            fresh_positions += part_positions
            continue
        cut = slice(part.rows.start, part.rows.end)
        module, shift = modules[part.key], part.shift
        if has_learned_positions(model):
            module, shift = replace(module, start=part.occurrence.start), 0
        layers = zip(*module_kv(model, module), strict=True)
        moved = [
            move(model, layer, keys[:, cut], values[:, cut], shift)
            for layer, (keys, values) in enumerate(layers)
        ]
        rows.append(([keys for keys, _ in moved], [values for _, values in moved]))
        positions += part_positions
    cache = DynamicCache()
    num_layers = model.config.num_hidden_layers
    for layer in range(num_layers if rows else 0):
        cache.update(
            torch.cat([keys[layer] for keys, _ in rows], dim=1)[None],
            torch.cat([values[layer] for _, values in rows], dim=1)[None],
            layer,
        )
    keys_at = [*positions, *fresh_positions]
    mask = _causal_by_position(fresh_positions, keys_at)
    return _forward(
        model, fresh_ids, fresh_positions, mask, cache=cache, cached_position_ids=positions
    )[-1]


def module_kv(model: Any, module: Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """KV of a module, computed with its context in one stock forward pass.

    Returns:
        Keys and values per layer, each ``[num_kv_heads, num_tokens, head_dim]``; with multi-head
        latent attention what the stock cache holds: the latents and the rotated channels.
    """
    ids = (*module.context_ids, *module.token_ids)
    own = range(module.start, module.start + len(module.token_ids))
    positions = (*module.context_positions, *own)
    cache = DynamicCache()
    _forward(model, ids, positions, _causal_by_position(positions, positions), cache=cache)
    skip = len(module.context_ids)
    layers = [cache.layers[index] for index in range(model.config.num_hidden_layers)]
    return [la.keys[0][:, skip:] for la in layers], [la.values[0][:, skip:] for la in layers]


def move(
    model: Any, layer: int, keys: torch.Tensor, values: torch.Tensor, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer as they stand ``shift`` position IDs from where they were."""
    inv_freq = frequencies(model, layer) if shift else None
    if inv_freq is None:
        return keys, values
    if has_latent_cache(model, keys):
        return keys, _turned(model, values, inv_freq * shift, first=0)
    has_trailing = getattr(model.config, "qk_rope_head_dim", None)
    first = keys.shape[-1] - 2 * inv_freq.shape[0] if has_trailing else 0
    return _turned(model, keys, inv_freq * shift, first=first), values


def _turned(model: Any, states: torch.Tensor, angles: torch.Tensor, *, first: int) -> torch.Tensor:
    """States whose pairs of channels, from channel ``first`` on, are turned in float64."""
    before, rotary, behind = states.split(
        (first, 2 * angles.shape[0], states.shape[-1] - first - 2 * angles.shape[0]), dim=-1
    )
    if is_interleaved(model):
        real, imag = rotary.double()[..., ::2], rotary.double()[..., 1::2]
    else:
        real, imag = rotary.double().chunk(2, dim=-1)
    pairs = torch.complex(real, imag) * torch.polar(torch.ones_like(angles), angles)
    if is_interleaved(model):
        turned = torch.stack((pairs.real, pairs.imag), dim=-1).flatten(-2)
    else:
        turned = torch.cat((pairs.real, pairs.imag), dim=-1)
    return torch.cat((before, turned.to(states.dtype), behind), dim=-1)


def _causal_by_position(queries: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(queries))[:, None] >= torch.tensor(list(keys))[None, :]


def _forward(
    model: Any,
    token_ids: Sequence[int],
    position_ids: Sequence[int],
    mask: torch.Tensor,
    *,
    cache: DynamicCache | None = None,
    cached_position_ids: Sequence[int] = (),
) -> torch.Tensor:
    names = inspect.signature(type(model).forward).parameters
    carrier = "cache" if "cache" in names else "past_key_values"
    arguments: dict[str, Any] = {} if cache is None else {carrier: cache, "use_cache": True}
    if "position_ids" in names:
        arguments["position_ids"] = torch.tensor([list(position_ids)])
    with (
        torch.no_grad(),
        attending(model, position_ids, (*cached_position_ids, *position_ids), mask),
    ):
        return model(
            input_ids=torch.tensor([list(token_ids)]),
            attention_mask=torch.ones(1, mask.shape[1], dtype=torch.long),
            **arguments,
        ).logits[0]
