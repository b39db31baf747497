"""The only file that touches transformers' attention interface.

transformers lets a model's attention be replaced by a registered function. Ours receives the fresh
queries, keys and values of a layer, position-encoded, and hands them to the running
``AttentionPass`` or ``BatchPass``. No transformers cache is used at all: the fresh KV is written to
the request's own buffer, and no mask is built, because transformers builds none for attention it
does not know. Where an architecture does not call that interface, the code in ``attention_modules``
stands in for its own.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import AttentionInterface

from pc_rag.errors import ModelError
from pc_rag.model.attention_modules import (
    carry,
    instance_attributes,
    own_attention_of,
    running_pass,
    swapped_forwards,
)
from pc_rag.model.detection.recording import CallRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from pc_rag.model.attention_modules import RunningPass

_NAME = "pc_rag"
_LOCKS: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()
_LOCKS_GUARD = Lock()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,  # noqa: ANN401 - architectures pass what they like
) -> tuple[torch.Tensor, None]:
    running = running_pass(module)
    if attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} asks for an attention mask "
            f"({' x '.join(map(str, attention_mask.shape))}), which attention over stored KV does "
            "not apply; use another model, or update transformers"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(running, CallRecorder):
        running.note_window(layer, sliding_window)
    out = running.attend(
        layer,
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def own_attention(model: Any, running: RunningPass) -> Iterator[None]:  # noqa: ANN401 - transformers is untyped here
    """Let this thread run the model with our attention; what it had before comes back on leaving.

    All engines of one model take turns here, whichever runner they have. Other threads that call
    the model meanwhile get a ``ModelError``. Not to be held over a ``yield``.

    Args:
        model: Any model; see ``Runner``.
        running: What its layers attend through.

    Raises:
        ModelError: The model's attention cannot be replaced for a while.
    """
    own = own_attention_of(model)
    with model_lock(model), carry(running), swapped_forwards(model), _no_masks(model):
        AttentionInterface.register(_NAME, _attention)
        before = model.config._attn_implementation  # noqa: SLF001 - there is no public getter
        # Under a name that it does not know, transformers builds no mask: where the model's code
        # fails without one, other threads would fail before they could be told why.
        if own is None or not own.takes_mask:
            model.config._attn_implementation = _NAME  # noqa: SLF001
        try:
            yield
        finally:
            model.config._attn_implementation = before  # noqa: SLF001


def implementation_of(model: Any) -> str:  # noqa: ANN401 - transformers is untyped here
    """Which attention the model uses when pc-rag does not run it, by transformers' name."""
    return str(model.config._attn_implementation)  # noqa: SLF001 - there is no public getter


def _no_masks(model: Any) -> AbstractContextManager[None]:  # noqa: ANN401 - as above
    """In transformers 5.0 some architectures build masks for attention that it does not know."""
    parts = (model.base_model, getattr(model.base_model, "decoder", None))
    name = "_update_causal_mask"
    return instance_attributes(
        [(part, name, lambda *_, **__: None) for part in parts if hasattr(part, name)]
    )


def model_lock(model: Any) -> Lock:  # noqa: ANN401 - transformers is untyped here
    """The one lock of a model, for as long as the model lives."""
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(model, Lock())
