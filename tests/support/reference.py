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

from pc_rag.layout.plan import Cached, Fresh, RequestPlan

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

    Right where every entry lies where it was encoded, or attended itself only.
    """
    positions = torch.tensor(plan.position_ids)
    owner = torch.tensor([number for number, part in enumerate(plan.parts) for _ in part.token_ids])
    mask = positions[:, None] >= positions[None, :]
    for number, part in enumerate(plan.parts):
        if isinstance(part, Cached):
            context = torch.tensor(modules[part.key].context_positions, dtype=torch.long)
            same_entry = torch.tensor(
                [isinstance(p, Cached) and p.key == part.key for p in plan.parts]
            )[owner]
            visible = same_entry | torch.isin(positions, context)
            mask[owner == number] &= visible
    return _forward(model, plan.token_ids, plan.position_ids, mask)[-1]


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
