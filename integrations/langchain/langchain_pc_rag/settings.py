"""What the chat model and the string model share: settings, the model behind them, and calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models import BaseLanguageModel
from langchain_core.utils import from_env
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus
from pc_rag.engine import PromptCache
from pc_rag.errors import ConfigError
from pc_rag.model.builtin import DEFAULT_MODEL
from pc_rag.serving import Call, Hold, Host, HostSettings, ToolChoice, generation_config, open_host

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from langchain_core.language_models.base import LangSmithParams

    from pc_rag.model.conversation import TextPrompt
    from pc_rag.model.sampling import GenerationConfig
    from pc_rag.serving import ReplyStream

PROVIDER = "pc-rag"
"""What traces and messages call us."""

_IGNORED = frozenset({"stream", "strict", "ls_structured_output_format"})
"""Words that frameworks add to calls and that change nothing here."""
_OPENED_WITH = ("store", "engine_config", "dtype", "device", "chat_template")
"""Settings that a model is opened with; a lent engine or corpus has its own."""
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
_ALIASES = {
    "model_name": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}
"""Names that the constructors of other models have for the same."""
_NO_OPS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stream_usage": (True,),
}
"""Settings of other models that change nothing at these values, and are refused at others."""
_GENERATION = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
)


class PcRagSettings(BaseLanguageModel[Any]):
    """Which model to run, what it reads, and how it chooses tokens.

    The model is loaded at the first call. Objects of equal settings share it with its corpus, and
    so do copies; it is released when the last of them is closed or gone.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str = Field(default_factory=from_env("PC_RAG_MODEL", default=DEFAULT_MODEL))
    """Hub name, model folder, ``.gguf`` file, or ``"smollm2"``, which needs no network and is the
    default, where the variable ``PC_RAG_MODEL`` names no other."""
    store: str | None = Field(default_factory=from_env("PC_RAG_STORE", default=None))
    """Folder that keeps the corpus and its entries; by default the one that the variable
    ``PC_RAG_STORE`` names. ``None`` keeps them in memory."""
    corpus: Corpus | None = Field(default=None, exclude=True, repr=False)
    """A corpus that is open already, in place of ``model`` and ``store``. Lent."""
    engine: PromptCache | None = Field(default=None, exclude=True, repr=False)
    """An engine that is open already, in place of ``model`` and ``store``. Lent."""
    engine_config: EngineConfig | None = Field(default=None, repr=False)
    """Capacities and policies; ``None`` reads ``PC_RAG_*`` variables, else the defaults."""
    dtype: str = "auto"
    """Compute dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``."""
    device: str = "auto"
    """``"auto"``, ``"cpu"``, ``"cuda"`` or another torch device."""
    chat_template: str | None = Field(default=None, repr=False)
    """Jinja source in place of the model's own chat template."""

    max_tokens: int | None = None
    """Most tokens of an answer; 256 by default."""
    temperature: float | None = None
    """0, the default, is greedy; larger is more random."""
    top_p: float | None = None
    """Sample among the likeliest tokens whose probabilities sum to this."""
    top_k: int | None = None
    """Sample among the k likeliest tokens."""
    min_p: float | None = None
    """Drop tokens less likely than this fraction of the likeliest one."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of the prompt and the answer less likely."""
    seed: int | None = None
    """The same seed gives the same tokens."""
    stop: list[str] | None = None
    """Strings that end an answer, in every call that gives none of its own."""
    timeout: float | None = None
    """Seconds after which a call fails, looked at between tokens."""
    max_retries: int | None = None
    """Taken for compatibility: a local model has no network that a second try would help."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Taken for compatibility: a model in your process asks for no key."""
    streaming: bool = False
    """Use the streaming path in ``invoke`` too; the tokens are the same."""

    template: str | None = None
    """Label of this model's prompts in metrics, for hit rates by template."""
    reuse: bool | None = None
    """``False`` computes every token of the same prompts; ``None`` as the engine is configured."""
    learn_prefix: bool = False
    """Encode all chunks behind the head of the prompts that come, too, in the background: their
    first chunks become exact hits. Costs the bytes of the corpus once more for each head."""

    _hold: Hold | None = PrivateAttr(default=None)
    _held_for: tuple[int, object] | None = PrivateAttr(default=None)
    _default_config: EngineConfig | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        """Take what other models' constructors call the same, and what changes nothing."""
        if not isinstance(given, dict):
            return given
        values = {_ALIASES.get(k, k): v for k, v in given.items() if not is_no_op(k, v)}
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        for name in ("model", "store"):
            if isinstance(values.get(name), Path):
                values[name] = str(values[name])
            if values.get(name) == "":
                raise ConfigError(f"{cls.__name__}: {name} is empty; name one, or leave it out")
        return values

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Refuse at once what would be refused at the first call."""
        lent = {name for name in ("corpus", "engine") if getattr(self, name) is not None}
        own = {name for name in _OPENED_WITH if self._is_changed(name)}
        if len(lent) > 1 or (lent and own):
            raise ConfigError(
                f"{type(self).__name__}: give one of corpus, engine, or a model name with its "
                f"settings; got {', '.join(sorted(own | lent))}"
            )
        if lent:
            name = self.host.model_name
            if self._is_changed("model") and self.model != name:
                raise ConfigError(
                    f"{type(self).__name__}: model {self.model!r} is not the model that was given, "
                    f"{name!r}; leave one of them out"
                )
            object.__setattr__(self, "model", name)
        else:
            _ = self.host  # loads nothing; another's ``close`` leaves it to this object from now on
        Call(prompt="", config=self._generation_config(None, {}), timeout_seconds=self.timeout)
        return self

    def _is_changed(self, name: str) -> bool:
        """Whether a setting is not the default; frameworks copy objects by giving every field."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)

    def _settings(self) -> HostSettings:
        if self._default_config is None:
            self._default_config = EngineConfig.load()
        return HostSettings(
            model=self.model,
            store=self.store,
            dtype=self.dtype,
            device=self.device,
            chat_template=self.chat_template,
            config=self.engine_config or self._default_config,
        )

    @property
    def host(self) -> Host:
        """The model with its corpus; opened when it is first asked for something."""
        source = self.corpus or self.engine or self._settings()
        held_for = (id(self), source)  # a copy, or a changed setting, needs a hold of its own
        if self._hold is None or self._held_for != held_for:
            self._hold, self._held_for = open_host(source).hold(), held_for
        return self._hold.host

    @property
    def prefix_learning(self) -> Future[int] | None:
        """The encoding that ``learn_prefix`` began last: its result is the number of chunks."""
        return self.host.learning

    def close(self) -> None:
        """Release model, corpus and store; a later call opens them again.

        They are closed once no other object of equal settings uses them. What was lent stays open.
        """
        hold, self._hold = self._hold, None
        if hold is not None and self._held_for is not None and self._held_for[0] == id(self):
            hold.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_corpus(self) -> Corpus:
        """The corpus whose chunks are recognised in prompts; loads the model at the first call."""
        return self.host.corpus

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.host.tokenizer.encode_text(text))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the model: neither weights nor what was lent are copied."""
        return self.__copy__()

    def __getstate__(self) -> dict[Any, Any]:
        """For pickle: settings, without the model.

        Raises:
            ConfigError: A corpus or engine was lent, which no other process can have.
        """
        if self.corpus is not None or self.engine is not None:
            raise ConfigError(
                f"a {type(self).__name__} with a lent corpus or engine cannot be pickled; build it "
                "from a model name and a store"
            )
        state = super().__getstate__()
        private = {**(state.get("__pydantic_private__") or {}), "_hold": None, "_held_for": None}
        return {**state, "__pydantic_private__": private}

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Every setting that changes an answer; response caches are keyed by them."""
        config = self.host.settings.config
        is_lent = self.corpus is not None or self.engine is not None
        return {
            "model": self.model,
            "fingerprint": self.host.engine.loaded.fingerprint if is_lent else None,
            "store": self.store,
            "dtype": self.dtype,
            "device": self.device,
            "chat_template": self.chat_template,
            "repair": config.repair,
            "visibility": config.visibility.value,
            "position_policy": config.position_policy.value,
            "storage_dtype": str(config.storage_dtype),
            "reuse": config.reuse if self.reuse is None else self.reuse,
            "learn_prefix": self.learn_prefix,
            "default_stop": self.stop,  # LangChain puts a call's own under "stop"
            **{name: getattr(self, name) for name in _GENERATION},
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _generation_config(
        self, stop: list[str] | None, overrides: dict[str, Any]
    ) -> GenerationConfig:
        """The settings of a generation: this object's, then a call's."""
        own = {name: getattr(self, name) for name in _GENERATION}
        return generation_config(
            {**own, "stop": self.stop}, overrides, {"stop": stop}, others=_CALL_ONLY
        )

    def _stream_call(
        self, prompt: TextPrompt, stop: list[str] | None, kwargs: dict[str, Any]
    ) -> ReplyStream:
        """Begin a call.

        Args:
            prompt: What the model is asked.
            stop: Of this call, in place of the object's.
            kwargs: What the caller gave by name; ``None`` is as if it were not there.
        """
        given = {
            name: value
            for name, value in kwargs.items()
            if value is not None and name not in _IGNORED and not is_no_op(name, value)
        }
        host = self.host
        if "model" in given:
            host = host.sibling(given.pop("model"))
        choice, tool_name = tool_choice_of(given.pop("tool_choice", None))
        call = Call(
            prompt=prompt,
            tool_choice=choice,
            tool_name=tool_name,
            max_tool_calls=1 if given.pop("parallel_tool_calls", None) is False else None,
            template=given.pop("template", self.template),
            reuse=given.pop("reuse", self.reuse),
            learn_prefix=given.pop("learn_prefix", self.learn_prefix),
            timeout_seconds=given.pop("timeout", self.timeout),
            config=self._generation_config(stop, given),
        )
        return host.stream(call)


def is_no_op(name: str, value: object) -> bool:
    """Whether a setting of other models has the value at which it changes nothing."""
    return name in _NO_OPS and (value is None or value in _NO_OPS[name])


def tool_choice_of(choice: Any) -> tuple[ToolChoice, str | None]:
    """What LangChain and OpenAI call a choice, in our words, and the tool it names.

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
        name = (choice.get("function") or choice).get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"tool_choice {choice!r} is unknown; use 'auto', 'any', 'none', the name of a tool, or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    return ToolChoice.ANY, name
