"""Which token stands for a parameter while its module is encoded."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pc_rag.errors import ModelError
from pc_rag.model.template_encoder import TemplateEncoder
from pc_rag.model.tokenizer import TextTokenizer
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_tokenizers import metaspace_tokenizer

TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"


def encoder_of(hf_tokenizer, **options):
    return TemplateEncoder(TextTokenizer(hf_tokenizer, **options))


def test_placeholder_is_the_unknown_token_when_it_means_nothing_else():
    """The paper's choice."""
    tokenizer = tiny_tokenizer()
    assert encoder_of(tokenizer).placeholder_id() == tokenizer.unk_token_id


@pytest.mark.parametrize("kind", ["unigram", "bpe-always", "bpe-first", "bpe-prepend"])
def test_space_is_one_token_when_a_tokenizer_marks_words(kind):
    """It is the mark, and the unknown token is there, too."""
    tokenizer = metaspace_tokenizer(kind)
    encoder = encoder_of(tokenizer)
    assert encoder.space_id() == tokenizer.convert_tokens_to_ids("▁")
    assert encoder.placeholder_id() == tokenizer.unk_token_id


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"unk_token": None}, {}),
        ({"eos_token": "<unk>"}, {}),
        ({"bos_token": "<unk>"}, {}),
        ({}, {"eos_ids": [256]}),
        ({}, {"chat_template": TEMPLATE.replace("<|turn|>", "<unk>")}),
    ],
)
def test_placeholder_is_a_space_when_the_unknown_token_is_not_neutral(changes, options):
    """It is missing, ends generations, begins texts, or marks turns."""
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    encoder = encoder_of(tokenizer, **options)
    assert encoder.placeholder_id() == encoder.space_id() == ord(" ")


def words_tokenizer(**options):
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def test_tokenizer_is_refused_when_it_has_no_neutral_token():
    """Only where one is needed: padding, or a parameter without an unknown token."""
    assert encoder_of(words_tokenizer(unk_token="[UNK]")).placeholder_id() == 1
    for call in ("space_id", "placeholder_id"):
        with pytest.raises(ModelError, match="no token for a space"):
            getattr(encoder_of(words_tokenizer()), call)()
