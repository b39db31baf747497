"""The slow truth: what a request's logits must be, computed by stock transformers only.

Nothing here uses the package's model room. Masks are dense, keys move in float64 by complex
multiplication, and every module is computed on its own.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from pc_rag.layout.plan import Fresh, RequestPlan

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
    """Each module alone at its encoded span, keys moved in float64, fresh tokens densely behind."""
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
        keys, values = module_kv(model, modules[part.key])
        cut = slice(part.rows.start, part.rows.end)
        rows.append(
            ([move(model, k[:, cut], part.shift) for k in keys], [v[:, cut] for v in values])
        )
        positions += part_positions
    cache = DynamicCache()
    num_layers = model.config.num_hidden_layers
    for layer in range(num_layers if rows else 0):
        cache.update(
            torch.cat([keys[layer] for keys, _ in rows], dim=1)[None],
            torch.cat([values[layer] for _, values in rows], dim=1)[None],
            layer,
        )
    mask = _causal_by_position(fresh_positions, [*positions, *fresh_positions])
    return _forward(model, fresh_ids, fresh_positions, mask, cache)[-1]


def module_kv(model: Any, module: Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """KV of a module, computed with its context in one stock forward pass.

    Returns:
        Keys and values per layer, each ``[num_kv_heads, num_tokens, head_dim]``.
    """
    ids = (*module.context_ids, *module.token_ids)
    own = range(module.start, module.start + len(module.token_ids))
    positions = (*module.context_positions, *own)
    cache = DynamicCache()
    _forward(model, ids, positions, _causal_by_position(positions, positions), cache)
    skip = len(module.context_ids)
    layers = [cache.layers[index] for index in range(model.config.num_hidden_layers)]
    return [la.keys[0][:, skip:] for la in layers], [la.values[0][:, skip:] for la in layers]


def move(model: Any, keys: torch.Tensor, shift: int) -> torch.Tensor:
    """Keys turned by ``shift`` position IDs as complex numbers in float64 (half-split pairs)."""
    inv_freq = next(b for n, b in model.named_buffers() if n.endswith("inv_freq")).double()
    half = inv_freq.shape[0]
    pairs = torch.complex(keys[..., :half].double(), keys[..., half : 2 * half].double())
    pairs = pairs * torch.polar(torch.ones_like(inv_freq), inv_freq * shift)
    turned = torch.cat((pairs.real, pairs.imag), dim=-1).to(keys.dtype)
    return torch.cat((turned, keys[..., 2 * half :]), dim=-1)


def _causal_by_position(queries: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(queries))[:, None] >= torch.tensor(list(keys))[None, :]


def _forward(
    model: Any,
    token_ids: Sequence[int],
    position_ids: Sequence[int],
    mask: torch.Tensor,
    cache: DynamicCache | None = None,
) -> torch.Tensor:
    names = inspect.signature(type(model).forward).parameters
    carrier = "cache" if "cache" in names else "past_key_values"
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([list(token_ids)]),
            position_ids=torch.tensor([list(position_ids)]),
            attention_mask=mask[None, None],
            **({} if cache is None else {carrier: cache, "use_cache": True}),
        ).logits[0]
