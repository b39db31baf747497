"""Tiny random models of several families, and a byte-level tokenizer, built in memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

FAMILIES = ("llama", "llama-mha", "llama-head-dim", "qwen3", "gpt_neox")
"""What tests use that need no more than some families; ``ARCHITECTURES`` has them all."""

SPECIAL_TOKENS = ("<unk>", "<s>", "<|im_start|>", "<|im_end|>")
"""Ids 256 to 259; the first 256 ids are the bytes."""

VOCAB_SIZE = 300
"""Size of the models' vocabulary: the tokenizer's 260 ids, padded as real models pad theirs."""

MAX_POSITIONS = 2048

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable stand-ins of byte-level BPE, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(substitutes)) for b in range(256)]


def tiny_tokenizer(
    *,
    add_bos: bool = False,
    chat_template: str | None = CHATML_TEMPLATE,
    pad_token: str | None = None,
    merges: Sequence[tuple[str, str]] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: id ``b`` is byte ``b``, then the special tokens, then the merges.

    Args:
        add_bos: Put exactly one ``<s>`` before a text, by a template post-processor.
        chat_template: Jinja source; ``None`` for a model without a template.
        pad_token: Usually absent, as in many decoder-only models.
        merges: BPE merges over the byte alphabet (a space is ``"\u0120"``), most frequent first.
    """
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    vocab.update({token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)})
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        pad_token=pad_token,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model; ``changes`` override its fields, by their common names."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.2,  # large, so that logits depend on what is attended
        "bos_token_id": 257,
        "eos_token_id": 259,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    kind = _model_class(family).config_class
    fields = common | dict(ARCHITECTURES[family].fields) | changes
    if "layer_types" in fields:
        fields["layer_types"] = list(fields["layer_types"])[: fields["num_hidden_layers"]]
    return kind(**{kind.attribute_map.get(name, name): value for name, value in fields.items()})


def _model_class(family: str) -> Any:
    name = ARCHITECTURES[family].model
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    modeling = sys.modules[kind.__module__]
    if family == "gptj" and not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(
            f"GPT-J of transformers {transformers.__version__} has an attention of its own, which "
            "pc-rag refuses by name"
        )
    return kind


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    add_bos: bool = False,
    **changes: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random model in eval mode, and its tokenizer.

    Args:
        family: One of ``ARCHITECTURES``. The test is skipped, with the reason, where this
            version of transformers has not got it.
        seed: The same seed gives the same weights; the global generator is left as it was.
        dtype: Numeric type of the weights.
        add_bos: The tokenizer puts one ``<s>`` before a text.
        changes: Fields of the configuration to override.
    """
    config = tiny_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model_class(family)(config)
    for parameter in model.parameters():  # the buffers of rotary embeddings stay in float32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.eval()
    model.generation_config.eos_token_id = 259
    return model, tiny_tokenizer(add_bos=add_bos)
