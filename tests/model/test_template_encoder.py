"""Which token stands for a parameter while its module is encoded."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pc_rag.errors import ModelError
from pc_rag.model.template_encoder import TemplateEncoder
from pc_rag.model.tokenizer import TextTokenizer
from pc_rag.types import Role
from tests.support.tiny_models import CHATML_TEMPLATE, tiny_tokenizer
from tests.support.tiny_tokenizers import metaspace_tokenizer

TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"


def encoder_of(hf_tokenizer, **options):
    return TemplateEncoder(TextTokenizer(hf_tokenizer, **options))


def test_placeholder_is_a_space_when_the_tokenizer_writes_every_byte():
    """Whatever it names as unknown: no text makes that token, and models read it as a border."""
    tokenizer = tiny_tokenizer()
    assert tokenizer.unk_token_id is not None
    assert encoder_of(tokenizer).placeholder_id() == encoder_of(tokenizer).space_id() == ord(" ")


@pytest.mark.parametrize("kind", ["unigram", "bpe-always", "bpe-first", "bpe-prepend"])
def test_space_is_one_token_when_a_tokenizer_marks_words(kind):
    """It is the mark, and the placeholder is the unknown token: the paper's choice."""
    tokenizer = metaspace_tokenizer(kind)
    encoder = encoder_of(tokenizer)
    assert encoder.space_id() == tokenizer.convert_tokens_to_ids("▁")
    assert encoder.placeholder_id() == tokenizer.unk_token_id


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"eos_token": "<unk>"}, {}),
        ({"bos_token": "<unk>"}, {}),
        ({}, {"eos_ids": [0]}),
        ({}, {"chat_template": TEMPLATE.replace("<|turn|>", "<unk>")}),
    ],
)
def test_placeholder_is_a_space_when_the_unknown_token_is_not_neutral(changes, options):
    """It ends generations, begins texts, or marks turns."""
    tokenizer = metaspace_tokenizer("bpe-always")
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    encoder = encoder_of(tokenizer, **options)
    assert encoder.placeholder_id() == encoder.space_id()


def words_tokenizer():
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_tokenizer_is_refused_when_it_has_no_neutral_token():
    """Only where one is needed: padding, or a parameter without an unknown token."""
    assert encoder_of(words_tokenizer()).placeholder_id() == 1
    for call in ("space_id", "placeholder_id"):
        with pytest.raises(ModelError, match="no token for a space"):
            getattr(encoder_of(words_tokenizer(), eos_ids=[1]), call)()


def test_no_prompt_begins_with_a_token_that_opens_every_turn():
    """Whatever it is called: SmolLM2 names the opening of a turn as its BOS."""
    tokenizer = tiny_tokenizer(chat_template=CHATML_TEMPLATE)
    tokenizer.bos_token = "<|im_start|>"
    encoder = encoder_of(tokenizer)
    assert encoder.beginning() == ()
    assert encoder.role_open(Role.USER, is_first=True)[0] == tokenizer.bos_token_id
