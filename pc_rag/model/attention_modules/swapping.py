"""Our forwards in place of a model's own: on its modules, not on their classes, and for a while."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pc_rag.errors import ModelError
from pc_rag.model.attention_modules.bloom import BLOOM
from pc_rag.model.attention_modules.falcon import FALCON
from pc_rag.model.attention_modules.gpt_neo import GPT_NEO
from pc_rag.model.attention_modules.mpt import MPT
from pc_rag.model.attention_modules.xglm import XGLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pc_rag.model.attention_modules.base import OwnAttention

_BY_MODEL_TYPE = {
    "bloom": BLOOM,
    "falcon": FALCON,
    "gpt_neo": GPT_NEO,
    "mpt": MPT,
    "xglm": XGLM,
}


def own_attention_of(model: Any) -> OwnAttention | None:  # noqa: ANN401 - transformers is untyped here
    """Our attention code for a model; ``None`` where the attention interface reaches it."""
    return _BY_MODEL_TYPE.get(model.config.model_type)


@contextmanager
def swapped_forwards(model: Any) -> Iterator[None]:  # noqa: ANN401 - as above
    """Run a model whose architecture needs it with our forwards; what it had is put back.

    Hooks of torch and of accelerate run as they did.

    Raises:
        ModelError: Some of its attention modules are of another class than transformers', or
            somebody else replaced their forward. None was swapped then.
    """
    own = own_attention_of(model)
    if own is None:
        yield
        return
    modules = [module for module in model.modules() if _class_name(module) in own.class_names]
    if len(modules) != model.config.num_hidden_layers:
        raise ModelError(
            f"{type(model).__name__}: {len(modules)} of {model.config.num_hidden_layers} layers "
            f"attend with a class that pc-rag knows ({', '.join(own.class_names)}); the KV of the "
            "others would be missing. Give pc-rag the model as transformers loads it"
        )
    swaps = [(module, _attribute_of(module), partial(own.forward, module)) for module in modules]
    with instance_attributes(swaps):
        yield


@contextmanager
def instance_attributes(swaps: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Give instances attributes in place of what their classes, or they themselves, have.

    Args:
        swaps: An instance, the name of its attribute, and what stands there meanwhile.
    """
    before = [vars(instance).get(name) for instance, name, _ in swaps]
    try:
        for instance, name, value in swaps:
            setattr(instance, name, value)
        yield
    finally:
        for (instance, name, _), former in zip(swaps, before, strict=True):
            if former is None:
                vars(instance).pop(name, None)
            else:
                setattr(instance, name, former)


def _class_name(module: Any) -> str:  # noqa: ANN401 - as above
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _attribute_of(module: Any) -> str:  # noqa: ANN401 - as above
    """Where a module's forward is kept; accelerate puts it aside and calls it between its hooks."""
    own = vars(module)
    if "forward" not in own:
        return "forward"
    aside = own.get("_old_forward")
    if "_hf_hook" in own and getattr(aside, "__func__", None) is type(module).forward:
        return "_old_forward"
    raise ModelError(
        f"the forward of a {type(module).__name__} was replaced by code that pc-rag does not know, "
        "and would be bypassed. Give pc-rag the model as transformers loads it"
    )
