"""A call's settings under the names that frameworks and other models give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from pc_rag.errors import ConfigError
from pc_rag.serving.call import Call, ToolChoice, generation_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pc_rag.model.conversation import TextPrompt
    from pc_rag.serving.host import Host
    from pc_rag.serving.reply import ReplyStream

GENERATION_SETTINGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
)
"""Settings of a generation that a model object has as defaults, besides ``stop``."""

ALIASES = {
    "model_name": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}
"""Names that the constructors of other models have for the same."""

_IGNORED = frozenset({"stream", "strict", "ls_structured_output_format"})
"""Words that frameworks add to calls and that change nothing here."""
_CALL_ONLY = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "model",
    "template",
    "reuse",
    "learn_prefix",
    "timeout",
)
"""What a call takes besides settings of the generation."""
_NO_OPS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stream_usage": (True,),
}
"""Settings of other models that change nothing at these values, and are refused at others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDefaults:
    """What a model object says about all its calls.

    Attributes:
        generation: Settings of the generation by name; ``None`` as if it were not there.
        template: Label of its prompts in metrics.
        reuse: ``False`` computes every token; ``None`` as the engine is configured.
        learn_prefix: See ``Call``.
        timeout_seconds: See ``Call``.

    Raises:
        ConfigError: A setting is unknown or out of range.
    """

    generation: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    reuse: bool | None = None
    learn_prefix: bool = False
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        config = generation_config(self.generation)
        Call(prompt="", config=config, timeout_seconds=self.timeout_seconds)


def begin_call(
    host: Host, prompt: TextPrompt, given: Mapping[str, Any], defaults: CallDefaults
) -> ReplyStream:
    """Begin a call of a model.

    Args:
        host: The model.
        prompt: What it is asked.
        given: What the caller gave by name, in OpenAI's and LangChain's words; ``None`` is as if
            it were not there. Not modified.
        defaults: What holds where nothing is given.

    Raises:
        ConfigError: An unknown name, or a value out of range.
    """
    options = {
        name: value
        for name, value in given.items()
        if value is not None and name not in _IGNORED and not is_no_op(name, value)
    }
    if "model" in options:
        host = host.sibling(_model_name(options.pop("model")))
    parallel = options.pop("parallel_tool_calls", None)
    if not isinstance(parallel, bool | None):
        raise ConfigError(f"parallel_tool_calls is {parallel!r}; give True or False")
    choice, tool_name = tool_choice_of(options.pop("tool_choice", None))
    call = Call(
        prompt=prompt,
        tool_choice=choice,
        tool_name=tool_name,
        max_tool_calls=1 if parallel is False else None,
        template=options.pop("template", defaults.template),
        reuse=options.pop("reuse", defaults.reuse),
        learn_prefix=options.pop("learn_prefix", defaults.learn_prefix),
        timeout_seconds=options.pop("timeout", defaults.timeout_seconds),
        config=generation_config(defaults.generation, options, others=_CALL_ONLY),
    )
    return host.stream(call)


def _model_name(model: object) -> str:
    if isinstance(model, str | PathLike) and str(model):
        return str(model)
    raise ConfigError(f"model is {model!r}; give a name, a folder or a .gguf file")


def is_no_op(name: str, value: object) -> bool:
    """Whether a setting of other models has the value at which it changes nothing."""
    return name in _NO_OPS and (value is None or value in _NO_OPS[name])


def tool_choice_of(choice: Any) -> tuple[ToolChoice, str | None]:  # noqa: ANN401 - a user gave it
    """What frameworks and OpenAI call a choice, in our words, and the tool it names.

    Args:
        choice: ``None``, ``False`` and ``"auto"`` leave it to the model; ``True``, ``"any"`` and
            ``"required"`` ask for a call; ``"none"`` forbids one; another string, or OpenAI's
            ``{"type": "function", "function": {"name": ...}}``, names the tool to call.

    Raises:
        ConfigError: None of these.
    """
    if choice is None or choice is False or choice == "auto":
        return ToolChoice.AUTO, None
    if choice is True or choice == "any" or choice == "required":  # noqa: PLR1714 - may be a dict
        return ToolChoice.ANY, None
    if choice == "none":
        return ToolChoice.NONE, None
    name = choice
    if isinstance(choice, dict):
        function = choice.get("function") or choice
        name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"tool_choice {choice!r} is unknown; use 'auto', 'any', 'none', the name of a tool, or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    return ToolChoice.ANY, name


def check_lent(owner: str, *, lent: Iterable[str], own: Iterable[str]) -> None:
    """Refuse a model object that is told twice what it runs on.

    Args:
        owner: What the object is called, for the message.
        lent: Which of ``corpus`` and ``engine`` it was given.
        own: Which settings it was given that a model is opened with.

    Raises:
        ConfigError: Several were lent, or one with settings beside it.
    """
    given, others = sorted(lent), sorted(own)
    if len(given) > 1 or (given and others):
        raise ConfigError(
            f"{owner}: give one of corpus, engine, or a model name with its settings; got "
            f"{', '.join(sorted([*given, *others]))}"
        )
