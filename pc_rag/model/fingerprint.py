"""What tells one model from another: everything that changes keys and values, hashed.

A fingerprint covers architecture, configuration, weights, adapters, tokenizer, chat template and
compute dtype. It does not cover the device or the attention kernel, which change rounding only.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import ModelError
from pc_rag.model.hf_attention import model_lock
from pc_rag.model.positions.frozen_rope import held
from pc_rag.types import Fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedModel

    from pc_rag.model.positions.frozen_rope import FrozenRope
    from pc_rag.model.tokenizer import TextTokenizer

_VERSION = "pc-rag model 1"
"""Changes when the encoding below does."""

_BLOCK_BYTES = 1 << 24
"""Tensors are hashed in blocks, so that threads share the large ones."""

_MAX_THREADS = 4

_IRRELEVANT_FIELDS = frozenset(
    {
        "architectures",  # set by saving; the class of the model is hashed instead
        "transformers_version",
        "dtype",  # how a file was stored; the dtype computed in is hashed instead
        "torch_dtype",
        "attn_implementation",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
        "id2label",
        "label2id",
        "problem_type",
        "bos_token_id",  # generation; the tokenizer is hashed
        "eos_token_id",
        "pad_token_id",
        "initializer_range",  # training
        "attention_dropout",
    }
)


def fingerprint_of(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    *,
    weights_digest: str | None = None,
    frozen: FrozenRope | None = None,
) -> Fingerprint:
    """Compute a model's fingerprint.

    Args:
        model: A loaded model; not modified.
        tokenizer: Its tokenizer.
        weights_digest: ``digest_weights(model)``, where it is already known.
        frozen: The frequencies that requests use, where those in the model change with the length
            of its latest prompt.

    Returns:
        The same 64 hex digits for the same model in any process.

    Raises:
        ModelError: Weights that are not in memory.
    """
    with model_lock(model), held(frozen):
        buffers = _digest_tensors(_transient_buffers(model))
    parts = {
        "version": _VERSION,
        "architecture": type(model).__name__,
        "config": _relevant_config(model.config.to_dict()),
        "dtype": str(model.dtype),
        "weights": weights_digest or digest_weights(model),
        "buffers": buffers,
        "adapters": _describe_adapters(model),
        "tokenizer": tokenizer.digest,
    }
    encoded = json.dumps(parts, sort_keys=True, default=str).encode()
    return Fingerprint(hashlib.sha256(encoded).hexdigest())


def digest_weights(model: PreTrainedModel) -> str:
    """Hash every parameter and stored buffer by name, dtype, shape and bytes.

    Adapters that are part of the model are among its parameters. Takes about half a second per
    gigabyte on two cores.

    Raises:
        ModelError: Weights that are not in memory.
    """
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }
    return _digest_tensors(state.items())


def _transient_buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that no file holds, above all the frequencies of rotary embeddings."""
    stored = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name not in stored:
            yield name, buffer


def _digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of hashes: BLAKE2b of every block, then SHA-256 over names, shapes and blocks."""
    by_name = sorted(tensors)
    first_names: dict[tuple[object, ...], str] = {}
    jobs: list[tuple[str, torch.Tensor]] = []
    digest = hashlib.sha256()
    for name, tensor in by_name:
        if tensor.device.type == "meta":
            raise ModelError(
                f"weight {name!r} is not in memory (meta device); load the whole model, without "
                f"offloading it to disk"
            )
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        tied_to = first_names.setdefault(identity, name) if tensor.numel() else name
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{tied_to}\n".encode())
        if tied_to == name:
            jobs.append((name, tensor))
    blocks = [block for _, tensor in jobs for block in _blocks_of(tensor)]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as executor:
        for block_digest in executor.map(_hash_block, blocks):
            digest.update(block_digest)
    return digest.hexdigest()


def _blocks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat pieces of a tensor; views, where its memory is contiguous."""
    flat = tensor.detach().reshape(-1)
    size = _BLOCK_BYTES // flat.element_size()
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size]


def _hash_block(block: torch.Tensor) -> bytes:
    data = block.cpu().contiguous().view(torch.uint8).numpy().data
    return hashlib.blake2b(data, digest_size=32).digest()


def _relevant_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without fields that change no key and no value, at every depth."""
    return {
        name: _relevant_config(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not name.startswith("_") and name not in _IRRELEVANT_FIELDS
    }


def _describe_adapters(model: PreTrainedModel) -> list[Any]:
    """Which adapters are active where, in the attributes that peft gives its layers.

    Adapter weights are parameters; this adds what is switched on, and how strongly.
    """
    described = []
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if not isinstance(scaling, dict):  # attention modules have a float of this name
            continue
        active = sorted(str(adapter) for adapter in getattr(module, "active_adapters", ()))
        is_disabled = bool(getattr(module, "disable_adapters", False))
        merged = sorted(str(adapter) for adapter in getattr(module, "merged_adapters", ()))
        scales = sorted((str(adapter), float(value)) for adapter, value in scaling.items())
        described.append([name, active, is_disabled, merged, scales])
    return described
