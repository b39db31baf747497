"""The only file that touches transformers' attention interface.

transformers lets a model's attention be replaced by a registered function. Ours receives the fresh
queries, keys and values of a layer, position-encoded, and hands them to the running
``AttentionPass`` or ``BatchPass``. No transformers cache is used at all: the fresh KV is written to
the request's own buffer, and no mask is built, because transformers builds none for attention it
does not know.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import AttentionInterface

from pc_rag.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pc_rag.model.attention import AttentionPass
    from pc_rag.model.batch_pass import BatchPass

_NAME = "pc_rag"
_LOCKS: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()
_LOCKS_GUARD = Lock()
CARRIER = "pc_rag_pass"
"""Keyword under which a forward pass carries its pass down to the layers."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ANN401 - architectures pass what they like
) -> tuple[torch.Tensor, None]:
    running: AttentionPass | BatchPass | None = kwargs.get(CARRIER)
    if running is None:
        raise ModelError(
            f"{type(module).__name__} was called without pc-rag's pass: by its owner, on another "
            "thread, while pc-rag was running it, or because its layers do not hand keyword "
            "arguments on. Give pc-rag a model of its own, or serialise the calls"
        )
    if attention_mask is not None or kwargs.get("softcap") is not None or "s_aux" in kwargs:
        raise ModelError(
            f"{type(module).__name__} asks for an attention mask, soft-capping or sinks, which "
            "attention over stored KV does not compute; use another model"
        )
    out = running.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def own_attention(model: Any) -> Iterator[None]:  # noqa: ANN401 - transformers is untyped here
    """Run the model with our attention; what the model had before is put back on leaving.

    All engines of one model take turns here, whichever runner they have. Not to be held over a
    ``yield``.
    """
    with _lock_of(model):
        AttentionInterface.register(_NAME, _attention)
        before = model.config._attn_implementation  # noqa: SLF001 - there is no public getter
        model.config._attn_implementation = _NAME  # noqa: SLF001
        try:
            yield
        finally:
            model.config._attn_implementation = before  # noqa: SLF001


def _lock_of(model: Any) -> Lock:  # noqa: ANN401 - transformers is untyped here
    """The one lock of a model, for as long as the model lives."""
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(model, Lock())
