"""Which model runs, what it reads and how it chooses tokens: the fields of ``PcRagLLM``."""

from __future__ import annotations

import os
from typing import Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import CustomLLM, LLMMetadata
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus
from pc_rag.engine import PromptCache
from pc_rag.errors import ConfigError
from pc_rag.model.builtin import DEFAULT_MODEL
from pc_rag.model.conversation import ChatMessage as PcRagMessage
from pc_rag.model.sampling import GenerationConfig
from pc_rag.serving import ModelObject, OwnHold, translated
from pc_rag.types import Role


class PcRagSettings(ModelObject, FunctionCallingLLM, CustomLLM):
    """Fields of the model, and what is opened by them.

    The model is loaded at the first call. Objects of equal settings share it with its corpus, and
    so do copies; it is released when the last of them is closed or gone.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str = Field(default_factory=lambda: os.environ.get("PC_RAG_MODEL", DEFAULT_MODEL))
    """Hub name, model folder, ``.gguf`` file, or ``"smollm2"``, which needs no network and is the
    default, where the variable ``PC_RAG_MODEL`` names no other."""
    store: str | None = Field(default_factory=lambda: os.environ.get("PC_RAG_STORE"))
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
    context_window: int | None = Field(default=None, gt=0)
    """What LlamaIndex may fill with prompt and answer; the model's own window by default."""
    is_chat_model: bool | None = None
    """Whether query engines send messages; by default, whether the model has a chat template."""

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

    template: str | None = None
    """Label of this model's prompts in metrics, for hit rates by template."""
    reuse: bool | None = None
    """``False`` computes every token of the same prompts; ``None`` as the engine is configured."""
    learn_prefix: bool = False
    """Encode all chunks behind the head of the prompts that come, too, in the background: their
    first chunks become exact hits. Costs the bytes of the corpus once more for each head."""

    _held: OwnHold | None = PrivateAttr(default=None)
    _default_config: EngineConfig | None = PrivateAttr(default=None)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:  # a ValueError, which LlamaIndex swallows
            raise ConfigError(_explained(error, type(self))) from error

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises the model."""
        return "PcRagLLM"

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        """Take what other models' constructors call the same, and what changes nothing."""
        return translated(cls.__name__, given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Refuse at once what would be refused at the first call."""
        self._check_formatters()
        self._check_model()
        return self

    def _check_formatters(self) -> None:
        """Refuse what would write control tokens as text, which stay plain text here."""
        if self.query_wrapper_prompt is not None:
            raise ConfigError(
                f"{type(self).__name__}: query_wrapper_prompt is given, which LlamaIndex has "
                "deprecated and leaves out of chats; write it into the prompt templates, or give "
                "chat_template (Jinja)"
            )
        formatters = (
            ("messages_to_prompt", messages_to_prompt),
            ("completion_to_prompt", default_completion_to_prompt),
        )
        for name, default in formatters:
            if getattr(self, name) not in (None, default):
                raise ConfigError(
                    f"{type(self).__name__}: {name} is given, but prompts are written by the "
                    "model's chat template, and control tokens in a text stay text; give "
                    "chat_template (Jinja) instead"
                )

    def _is_changed(self, name: str) -> bool:
        """Whether a setting is not the default; copies are made by giving every field."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts by; needs the model's configuration, not its weights."""
        host = self.host
        window = host.max_position
        chat_format = host.chat_format
        return LLMMetadata(
            context_window=min(window, self.context_window or window),
            num_output=self._num_output,
            is_chat_model=(
                chat_format.has_template if self.is_chat_model is None else self.is_chat_model
            ),
            is_function_calling_model=chat_format.knows_tools
            and chat_format.tool_format is not None,
            model_name=host.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """What events say about the model; its name only, before the model was looked at.

        Events are made on the event loop, where nothing may be loaded.
        """
        if self.host.is_described:
            return super().to_payload()
        return {"class_name": self.class_name(), "model_name": self.host.model_name}

    @property
    def _num_output(self) -> int:
        return GenerationConfig().max_new_tokens if self.max_tokens is None else self.max_tokens

    def tokenizer(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer, without special tokens.

        ``Settings.tokenizer = llm.tokenizer`` has LlamaIndex count by it.
        """
        return list(self.host.tokenizer.encode_text(text))

    def prompt_helper(self, **options: Any) -> PromptHelper:
        """A helper that counts by the model's own tokenizer, and leaves room for its template.

        LlamaIndex's own counts by a tokenizer of other models, and knows no chat template.

        Args:
            **options: As for ``PromptHelper``, such as ``chunk_overlap_ratio``.
        """
        metadata = self.metadata
        window = metadata.context_window
        if metadata.is_chat_model:
            window -= self._num_template_tokens
        return PromptHelper(
            context_window=window,
            num_output=metadata.num_output,
            tokenizer=self.tokenizer,
            **options,
        )

    @property
    def _num_template_tokens(self) -> int:
        """Tokens that the chat template puts around a prompt's messages.

        Of a prompt with a system text beside ``system_prompt``, and one exchange before the
        question: as many as prompts of LlamaIndex have, which counts the contents only.
        """
        text = "x"
        systems = [PcRagMessage(Role.SYSTEM, text)] * 2
        exchange = [PcRagMessage(role, text) for role in (Role.USER, Role.ASSISTANT, Role.USER)]
        pieces = self.host.chat_format.render([*systems, *exchange])
        num_content_tokens = 5 * len(self.tokenizer(text))
        return sum(len(piece.token_ids) for piece in pieces) - num_content_tokens

    def __copy__(self) -> Self:
        """A copy that shares the model."""
        return super().__copy__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the model: neither weights nor what was lent are copied."""
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: settings, without the model, its listeners and its rate limiter.

        Raises:
            ConfigError: A corpus or engine was lent, which no other process can have.
        """
        self._check_picklable()
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        default = {
            "callback_manager",
            "rate_limiter",
            "messages_to_prompt",
            "completion_to_prompt",
        }
        return {
            "__dict__": {name: value for name, value in fields.items() if name not in default},
            "__pydantic_private__": None,
        }


def _explained(error: ValidationError, kind: type[PcRagSettings]) -> str:
    """What is wrong with the settings of a model, and what is known where a name is not."""
    faults = error.errors(include_url=False)
    told = [
        f"{'.'.join(map(str, fault['loc'])) or 'settings'} is {fault['input']!r:.60}: "
        f"{fault['msg'][:1].lower()}{fault['msg'][1:]}"
        for fault in faults
    ]
    unknown = any(fault["type"] == "extra_forbidden" for fault in faults)
    known = f". Known settings: {', '.join(sorted(kind.model_fields))}" if unknown else ""
    return f"{kind.__name__}: {'; '.join(told)}{known}"
