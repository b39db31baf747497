"""What the model objects of all frameworks do: open what they name, share it and close it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pc_rag.config import EngineConfig
from pc_rag.errors import ConfigError
from pc_rag.serving.host import HostSettings, OwnHold
from pc_rag.serving.options import (
    ALIASES,
    GENERATION_SETTINGS,
    CallDefaults,
    check_lent,
    is_no_op,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from pc_rag.corpus import Corpus
    from pc_rag.engine import PromptCache
    from pc_rag.serving.host import Host

_OPENED_WITH: Final = (
    "store", "engine_config", "dtype", "device", "chat_template", "max_position",
)  # fmt: skip
"""Settings that a model is opened with; a lent engine or corpus has its own."""


def translated(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a model object has them, from what other models' constructors call the same.

    Args:
        owner: What the object is called, for messages.
        given: Names and values; what changes nothing is left out, and so is ``None`` beside another
            name's value. Not modified.

    Raises:
        ConfigError: A model or store without a name, or one setting under two names.
    """
    values: dict[str, Any] = {}
    for given_name, value in given.items():
        name = ALIASES.get(given_name, given_name)
        if is_no_op(given_name, value):
            continue
        known = values.get(name)
        if known is not None and value is None:
            continue
        if known is not None and known != value:
            raise ConfigError(
                f"{owner}: {name} is given twice, as {known!r} and {value!r}; other names "
                f"of it are {', '.join(k for k, v in ALIASES.items() if v == name)}; leave one out"
            )
        values[name] = value
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    for name in ("model", "store"):
        if isinstance(values.get(name), Path):
            values[name] = str(values[name])
        if values.get(name) == "":
            raise ConfigError(f"{owner}: {name} is empty; name one, or leave it out")
    return values


class ModelObject:
    """A model as an object of a framework, which has the settings as its fields: a mixin.

    The model is loaded at the first call. Objects of equal settings share it with its corpus, and
    so do copies; it is released when the last of them is closed or gone.

    The class that takes it declares what is annotated here.
    """

    if TYPE_CHECKING:
        model: str
        store: str | None
        corpus: Corpus | None
        engine: PromptCache | None
        engine_config: EngineConfig | None
        dtype: str
        device: str
        chat_template: str | None
        max_position: int | None
        stop: list[str] | None
        timeout: float | None
        template: str | None
        reuse: bool | None
        learn_prefix: bool
        _held: OwnHold | None
        _default_config: EngineConfig | None

        def _is_changed(self, name: str) -> bool:
            """Whether a setting is not the default."""

    def _check_model(self) -> None:
        """Refuse at once what would be refused at the first call; loads nothing.

        Raises:
            ConfigError: Settings contradict each other, or one is out of range.
        """
        owner = type(self).__name__
        lent = [name for name in ("corpus", "engine") if getattr(self, name) is not None]
        own = [name for name in _OPENED_WITH if self._is_changed(name)]
        check_lent(owner, lent=lent, own=own)
        name = self.host.model_name  # another's ``close`` leaves the host to this object
        if lent:
            if self._is_changed("model") and self.model != name:
                raise ConfigError(
                    f"{owner}: model {self.model!r} is not the model that was given, {name!r}; "
                    "leave one of them out"
                )
            object.__setattr__(self, "model", name)
        _ = self._defaults

    @property
    def _defaults(self) -> CallDefaults:
        """What holds for every call."""
        own = {name: getattr(self, name) for name in GENERATION_SETTINGS}
        return CallDefaults(
            generation={**own, "stop": self.stop},
            template=self.template,
            reuse=self.reuse,
            learn_prefix=self.learn_prefix,
            timeout_seconds=self.timeout,
        )

    def _settings(self) -> HostSettings:
        if self._default_config is None:
            self._default_config = EngineConfig.load()
        return HostSettings(
            model=self.model,
            store=self.store,
            dtype=self.dtype,
            device=self.device,
            chat_template=self.chat_template,
            max_position=self.max_position,
            config=self.engine_config or self._default_config,
        )

    @property
    def host(self) -> Host:
        """The model with its corpus; opened when it is first asked for something."""
        source = self.corpus or self.engine or self._settings()
        self._held = OwnHold.renewed(self._held, self, source)
        return self._held.hold.host

    @property
    def prefix_learning(self) -> Future[int] | None:
        """The encoding that ``learn_prefix`` began last: its result is the number of chunks."""
        return self.host.learning

    def open_corpus(self) -> Corpus:
        """The corpus whose chunks are recognised in prompts; loads the model at the first call."""
        return self.host.corpus

    def close(self) -> None:
        """Release model, corpus and store; a later call opens them again.

        They are closed once no other object of equal settings uses them. What was lent stays open.
        """
        held, self._held = self._held, None
        if held is not None:
            held.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_picklable(self) -> None:
        """Refuse to pickle what no other process can have.

        Raises:
            ConfigError: A corpus or engine was lent.
        """
        if self.corpus is not None or self.engine is not None:
            raise ConfigError(
                f"a {type(self).__name__} with a lent corpus or engine cannot be pickled; build it "
                "from a model name and a store"
            )
