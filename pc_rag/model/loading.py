"""Loading a model by hub name, folder, GGUF file, or as it is."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pc_rag.errors import ConfigError, ModelError, PromptCacheError
from pc_rag.model.builtin import (
    DEFAULT_MODEL,
    convert_gguf,
    find_default_gguf,
)
from pc_rag.model.detection.detect import Detection, detect
from pc_rag.model.detection.limits import position_limit
from pc_rag.model.detection.self_check import SelfCheck, passed_check
from pc_rag.model.detection.support import check_supported
from pc_rag.model.devices import choose_device, choose_dtype, move_model
from pc_rag.model.fingerprint import fingerprint_of
from pc_rag.model.quiet import TRANSFORMERS_LOCK, quiet_progress
from pc_rag.model.template_input import check_template
from pc_rag.model.tokenizer import TextTokenizer
from pc_rag.model.weights_memo import folder_of, remembered_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pc_rag.types import Fingerprint


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A model that is ready to be used, and what tells it from others.

    Attributes:
        model: The causal language model, in eval mode.
        tokenizer: Its tokenizer.
        name: What the user called it.
        fingerprint: Digest of all that changes keys and values, taken when it was loaded.
        device: Where the weights lie.
        dtype: Numeric type it computes in.
        architecture: Name of the model's class, for example ``LlamaForCausalLM``.
        max_position: Position IDs that requests may use.
        detection: What it was seen to do with positions.
        self_check: How its stored KV compared with what it computes by itself.
    """

    model: PreTrainedModel
    tokenizer: TextTokenizer
    name: str
    fingerprint: Fingerprint
    device: torch.device
    dtype: torch.dtype
    architecture: str
    max_position: int
    detection: Detection
    self_check: SelfCheck


def load_model(
    name_or_path: str | Path = DEFAULT_MODEL,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    max_position: int | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: A name on the hub, a model folder, a ``.gguf`` file (converted once into the
            user's cache), or ``"smollm2"``, the default model that needs no network.
        dtype: ``"auto"`` is bfloat16 on CUDA devices that have it (else float16) and float32
            elsewhere; or ``"float32"``, ``"bfloat16"``, ``"float16"``.
        device: ``"auto"`` is the first CUDA device, else the CPU; or a torch device.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run code that comes with the model.
        chat_template: Jinja source that takes the place of the model's own chat template; base
            models have none.
        max_position: Position IDs that requests may use; by default those the model was made for.
            With LongRoPE that is the original length, for which the short factors serve; asking for
            more takes the long factors for every request. With ALiBi more may be asked for.

    Raises:
        ModelError: Nothing loadable is found there.
        UnsupportedModelError: The model lacks what prompt caching needs, or does not compute what
            pc-rag computes with it (see ``self_check``).
        MissingDependencyError: A GGUF file without the ``gguf`` extra.
        ConfigError: An unknown dtype or device, a chat template that is not Jinja, or more
            position IDs than the model has.
    """
    check_template(chat_template)
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    with TRANSFORMERS_LOCK, quiet_progress():
        source = _resolve(name_or_path)
    options: dict[str, Any] = {
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
    }
    with TRANSFORMERS_LOCK, quiet_progress(), _explained(name_or_path):
        config = AutoConfig.from_pretrained(source, **options)
        check_supported(config)
        position_limit(config, max_position)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = _read_weights(source, name_or_path, config=config, dtype=chosen_dtype, **options)
    move_model(model, chosen_device, name_or_path)
    folder = folder_of(source, revision=options["revision"])
    return _wrap(
        model,
        tokenizer,
        name=str(name_or_path),
        folder=folder,
        chat_template=chat_template,
        max_position=max_position,
        is_check_kept=not trust_remote_code,
    )


def as_loaded(
    model: str | Path | LoadedModel,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    chat_template: str | None = None,
    max_position: int | None = None,
) -> LoadedModel:
    """A model that is loaded already as it is, or one that is loaded now.

    Args:
        model: As ``load_model``, or a loaded model.
        dtype: As ``load_model``; a loaded model keeps its own.
        device: Alike.
        chat_template: As ``load_model``; not with a loaded model.
        max_position: Alike.

    Raises:
        ConfigError: A chat template or a limit for a loaded model, and as ``load_model``.
        ModelError: As ``load_model``.
    """
    given = {"chat_template": chat_template, "max_position": max_position}
    if not isinstance(model, LoadedModel):
        return load_model(
            model, dtype=dtype, device=device, chat_template=chat_template,
            max_position=max_position,
        )  # fmt: skip
    if names := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(names)} was given with a model that is loaded already, whose "
            "fingerprint it may change; give it to load_model or wrap_model"
        )
    return model


def load_tokenizer(
    name_or_path: str | Path = DEFAULT_MODEL, *, chat_template: str | None = None
) -> TextTokenizer:
    """Load a model's tokenizer without its weights.

    Args:
        name_or_path: As ``load_model``.
        chat_template: As ``load_model``.

    Raises:
        ModelError: Nothing loadable is found there.
        MissingDependencyError: A GGUF file without the ``gguf`` extra.
        ConfigError: A chat template that is not Jinja.
    """
    check_template(chat_template)
    with TRANSFORMERS_LOCK, quiet_progress():
        source = _resolve(name_or_path)
        with _explained(name_or_path):
            tokenizer = AutoTokenizer.from_pretrained(source)
    return TextTokenizer(tokenizer, chat_template=chat_template)


def load_max_position(
    name_or_path: str | Path = DEFAULT_MODEL, *, max_position: int | None = None
) -> int:
    """Position IDs that requests of a model may use, read from its configuration alone.

    Args:
        name_or_path: As ``load_model``.
        max_position: As ``load_model``.

    Raises:
        ModelError: Nothing loadable is found there.
        UnsupportedModelError: The model lacks what prompt caching needs.
        MissingDependencyError: A GGUF file without the ``gguf`` extra.
        ConfigError: More position IDs than the model has.
    """
    with TRANSFORMERS_LOCK, quiet_progress():
        source = _resolve(name_or_path)
        with _explained(name_or_path):
            config = AutoConfig.from_pretrained(source)
    check_supported(config)
    return position_limit(config, max_position)


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "",
    chat_template: str | None = None,
    max_position: int | None = None,
) -> LoadedModel:
    """Use a model that is already in memory; its weights, device and dtype stay as they are.

    The model is put into eval mode, unless it is refused. Its fingerprint is taken now: weights or
    adapters changed later need another call.

    Args:
        model: A causal language model.
        tokenizer: Its fast tokenizer.
        name: What to call it; by default the name it was loaded by.
        chat_template: As for ``load_model``; the tokenizer keeps its own.
        max_position: As for ``load_model``.

    Raises:
        ModelError: A tokenizer without a fast backend.
        UnsupportedModelError: As ``load_model``.
        ConfigError: A chat template that is not Jinja, or more position IDs than the model has.
    """
    check_template(chat_template)
    name = name or model.name_or_path or type(model).__name__
    return _wrap(
        model, tokenizer, name=name, chat_template=chat_template, max_position=max_position
    )


def _wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    folder: Path | None = None,
    chat_template: str | None = None,
    max_position: int | None = None,
    is_check_kept: bool = False,
) -> LoadedModel:
    check_supported(model.config, model)
    wrapped = TextTokenizer(tokenizer, eos_ids=_eos_ids(model), chat_template=chat_template)
    with _in_eval_mode(model):
        digest = remembered_digest(model, folder) if folder else None
        found = detect(model, max_position=max_position)
        fingerprint = fingerprint_of(model, wrapped, weights_digest=digest, frozen=found.frozen)
        check = passed_check(model, found, fingerprint, is_kept=is_check_kept)
    return LoadedModel(
        model=model,
        tokenizer=wrapped,
        name=name,
        fingerprint=fingerprint,
        device=model.device,
        dtype=model.dtype,
        architecture=type(model).__name__,
        max_position=found.max_position,
        detection=found,
        self_check=check,
    )


@contextmanager
def _in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into eval mode for good; back into its own where what follows fails."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    except BaseException:
        for module, is_training in modes:
            module.training = is_training
        raise


def _resolve(name_or_path: str | Path) -> str:
    """What ``from_pretrained`` is given: a folder, or a name on the hub."""
    if name_or_path == DEFAULT_MODEL:
        return str(convert_gguf(find_default_gguf()))
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"no GGUF file at {path}; check the path")
        return str(convert_gguf(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path} is not a model folder: it holds no config.json. Give the folder that "
                f"save_pretrained wrote, or a .gguf file"
            )
        return str(path)
    if isinstance(name_or_path, Path) or path.is_absolute() or str(name_or_path).startswith("."):
        raise ModelError(f"there is no model folder or .gguf file at {path}; check the path")
    return str(name_or_path)


@contextmanager
def _explained(name: str | Path) -> Iterator[None]:
    """Turn what transformers raises for an unusable model into a ``ModelError``."""
    try:
        yield
    except PromptCacheError:
        raise
    except (OSError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"cannot load {str(name)!r}: {_first_line(error)}. If it is a name on the hub, load it "
            f"once while online, or give the path of a model folder or .gguf file; "
            f"{DEFAULT_MODEL!r} needs no network"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except StrictDataclassError as error:
        raise ModelError(
            f"{str(name)!r} is not a causal language model that transformers "
            f"{transformers.__version__} knows: its config.json is not valid "
            f"({' '.join(str(error).split())}). Correct the field, or update transformers"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"{str(name)!r} is not a causal language model that transformers "
            f"{transformers.__version__} knows: {_first_line(error)}. Update transformers, or pass "
            f"trust_remote_code=True if the model brings code that you trust"
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every id that the model's settings say ends a generation."""
    found: list[int] = []
    for settings in (model.generation_config, model.config):
        value = getattr(settings, "eos_token_id", None)
        if value is not None:
            found += value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(int(token_id) for token_id in found))


def _read_weights(source: str, name: str | Path, **options: Any) -> PreTrainedModel:  # noqa: ANN401 - transformers' own
    model: PreTrainedModel
    model, report = AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, **options
    )
    _check_complete(report, name)
    return model


def _check_complete(report: dict[str, Any], name: str | Path) -> None:
    """Refuse a model whose files lack weights, which transformers fills with random numbers."""
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"the files of {str(name)!r} lack {len(missing)} weights of the model, the first of "
            f"them {missing[0]!r}; fetch or save the model again"
        )
