"""Settings that the chat model and the string model share, and the calls made of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from langchain_core.utils import from_env
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus
from pc_rag.engine import PromptCache
from pc_rag.errors import ConfigError
from pc_rag.model.builtin import DEFAULT_MODEL
from pc_rag.serving import Call, Host, HostSettings, generation_config, open_host

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from concurrent.futures import Future

    from pc_rag.model.conversation import TextPrompt
    from pc_rag.serving import ReplyStream

_IGNORED = frozenset({"stream", "strict"})
"""Words that frameworks add to calls and that change nothing here."""


class PcRagSettings(BaseModel):
    """Which model to run, what it reads, and how it chooses tokens.

    The model is loaded at the first call, once a process: objects of equal settings share it.
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

    _host: Host | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _take_host(self) -> Self:
        lent = [each for each in (self.corpus, self.engine) if each is not None]
        own = self.model_fields_set & {"store", "engine_config", "dtype", "device", "chat_template"}
        if len(lent) > 1 or (lent and own):
            raise ConfigError(
                f"{type(self).__name__}: give one of corpus, engine, or a model name with its "
                f"settings; got {', '.join(sorted(own | self._lent_names()))}"
            )
        # An engine names its model; what the caller wrote beside it must be the same.
        self._host = host = open_host(lent[0] if lent else self._settings())
        if lent and "model" in self.model_fields_set and self.model != host.model_name:
            raise ConfigError(
                f"{type(self).__name__}: model {self.model!r} is not the model that was given, "
                f"{host.model_name!r}; leave one of them out"
            )
        if lent:
            object.__setattr__(self, "model", host.model_name)
        self._generation_config({})
        return self

    def _lent_names(self) -> set[str]:
        return {name for name in ("corpus", "engine") if getattr(self, name) is not None}

    def _settings(self) -> HostSettings:
        return HostSettings(
            model=self.model,
            store=self.store,
            dtype=self.dtype,
            device=self.device,
            chat_template=self.chat_template,
            config=self.engine_config or EngineConfig.load(),
        )

    @property
    def host(self) -> Host:
        """The model with its corpus; opened when it is first asked for something."""
        if self._host is None:  # a copy made without validation
            self._host = open_host(self.corpus or self.engine or self._settings())
        return self._host

    @property
    def prefix_learning(self) -> Future[int] | None:
        """The encoding that ``learn_prefix`` began last: its result is the number of chunks."""
        return self.host.learning

    def close(self) -> None:
        """Release model, corpus and store, unless they were lent. A later call opens them again."""
        self.host.close()

    def open_corpus(self) -> Corpus:
        """The corpus whose chunks are recognised in prompts; loads the model at the first call."""
        return self.host.corpus

    def _generation_config(self, overrides: dict[str, Any]) -> Any:
        """The settings of a generation: this object's, then a call's."""
        names = (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "seed",
            "stop",
        )
        return generation_config({name: getattr(self, name) for name in names}, overrides)

    def _stream_call(
        self, prompt: TextPrompt, stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[Host, ReplyStream]:
        """Begin a call.

        Args:
            prompt: What the model is asked.
            stop: Of this call, in place of the object's.
            kwargs: What the caller gave by name.
        """
        given = {name: value for name, value in kwargs.items() if name not in _IGNORED}
        host = self.host.sibling(given.pop("model", None) or self.host.model_name)
        call = Call(
            prompt=prompt,
            tool_choice=given.pop("tool_choice", None) or "auto",
            max_tool_calls=1 if given.pop("parallel_tool_calls", None) is False else None,
            template=given.pop("template", None) or self.template,
            reuse=given.pop("reuse", self.reuse),
            learn_prefix=given.pop("learn_prefix", self.learn_prefix),
            timeout_seconds=given.pop("timeout", self.timeout),
            config=self._generation_config({**given, "stop": stop}),
        )
        return host, host.stream(call)

    def _identity(self) -> dict[str, Any]:
        """Every setting that changes an answer."""
        config = self.host.settings.config
        is_known = self.corpus is not None or self.engine is not None
        return {
            "model": self.model,
            "fingerprint": self.host.engine.loaded.fingerprint if is_known else None,
            "dtype": self.dtype,
            "chat_template": self.chat_template,
            "repair": config.repair,
            "visibility": config.visibility.value,
            "position_policy": config.position_policy.value,
            "storage_dtype": str(config.storage_dtype),
            "reuse": config.reuse if self.reuse is None else self.reuse,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop": self.stop,
        }


async def pulled(stream: ReplyStream) -> AsyncGenerator[str]:
    """A reply's text, computed in threads: the event loop goes on meanwhile.

    A task that is cancelled, or a consumer that leaves, ends the generation within a token.
    """
    try:
        while (piece := await asyncio.to_thread(next, stream, None)) is not None:
            yield piece
    finally:
        stream.close()
