"""What the chat model and the string model share: settings, the model behind them, and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models import BaseLanguageModel
from langchain_core.utils import from_env
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus
from pc_rag.engine import PromptCache
from pc_rag.model.builtin import DEFAULT_MODEL
from pc_rag.serving import ModelObject, OwnHold, begin_call, translated
from pc_rag.serving.options import GENERATION_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from langchain_core.language_models.base import LangSmithParams

    from pc_rag.model.conversation import TextPrompt
    from pc_rag.serving import ReplyStream

PROVIDER = "pc-rag"
"""What traces and messages call us."""


class PcRagSettings(ModelObject, BaseLanguageModel[Any]):
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
    max_position: int | None = Field(default=None, gt=0)
    """Position IDs that prompt and answer may use; by default those the model was made for. More
    take LongRoPE's long factors, and are allowed with ALiBi."""

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

    _held: OwnHold | None = PrivateAttr(default=None)
    _default_config: EngineConfig | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        """Take what other models' constructors call the same, and what changes nothing."""
        return translated(cls.__name__, given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Refuse at once what would be refused at the first call."""
        self._check_model()
        return self

    def _is_changed(self, name: str) -> bool:
        """Whether a setting is not the default; frameworks copy objects by giving every field."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)

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
        self._check_picklable()
        state = super().__getstate__()
        private = {**(state.get("__pydantic_private__") or {}), "_held": None}
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
            "max_position": self.max_position,
            "repair": config.repair,
            "visibility": config.visibility.value,
            "position_policy": config.position_policy.value,
            "storage_dtype": str(config.storage_dtype),
            "reuse": config.reuse if self.reuse is None else self.reuse,
            "learn_prefix": self.learn_prefix,
            "default_stop": self.stop,  # LangChain puts a call's own under "stop"
            **{name: getattr(self, name) for name in GENERATION_SETTINGS},
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _stream_call(
        self, prompt: TextPrompt, stop: list[str] | None, kwargs: dict[str, Any]
    ) -> ReplyStream:
        """Begin a call.

        Args:
            prompt: What the model is asked.
            stop: Of this call, in place of the object's.
            kwargs: What the caller gave by name; ``None`` is as if it were not there.
        """
        given = kwargs if stop is None else {**kwargs, "stop": stop}
        return begin_call(self.host, prompt, given, self._defaults)
