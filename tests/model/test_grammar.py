"""Grammars as values, and what their matchers allow token by token."""

from __future__ import annotations

import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pc_rag.errors import ConfigError, GenerationError, MissingDependencyError
from pc_rag.model.grammar import Grammar
from pc_rag.model.grammar_compiler import GrammarCompiler
from pc_rag.model.sampling import GenerationConfig, Sampler
from pc_rag.model.tokenizer import TextTokenizer
from tests.support.tiny_models import VOCAB_SIZE, byte_alphabet, tiny_tokenizer
from tests.support.tiny_tokenizers import metaspace_tokenizer

OPENER, EOS = 258, 259


def compiler_of(tokenizer=None, **options):
    options = {"eos_ids": ()} | options
    text = TextTokenizer(tokenizer or tiny_tokenizer(), eos_ids=options.pop("eos_ids"))
    return GrammarCompiler(text, **options)


@pytest.fixture(scope="module")
def compiler():
    pytest.importorskip("llguidance", reason="needs the extra pc-rag[structured]")
    return compiler_of()


def allowed(matcher, vocab_size=VOCAB_SIZE):
    """The ids that a matcher allows next."""
    return torch.isfinite(matcher.mask(torch.zeros(vocab_size))).nonzero()[:, 0].tolist()


def write(compiler, grammar, choose=min, most=80):
    """Follow a grammar, choosing among what it allows; the ids up to its end."""
    matcher, ids = compiler.start(grammar), []
    while not matcher.is_finished and len(ids) < most:
        ids.append(choose(allowed(matcher, vocab_size=1000)))
        matcher.advance(ids[-1])
    return ids


# -- values -----------------------------------------------------------------------------------


def test_grammars_are_equal_when_they_say_the_same():
    """Equal grammars hash alike; the order of properties is part of what they say."""
    schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    turned = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Grammar.json(schema) == Grammar.json(dict(schema))
    assert hash(Grammar.json(schema)) == hash(Grammar.json(dict(schema)))
    assert Grammar.json(schema) != Grammar.json(turned)
    assert Grammar.json(schema) != Grammar.json(schema, suffix="!")
    assert Grammar.choice(["a", "b", "a"]) == Grammar.choice(("a", "b"))
    assert Grammar.json() == Grammar.json({"type": "object"})
    assert Grammar.regex("a") != Grammar.lark("a")


def test_grammar_is_as_it_was_when_its_schema_changes_later():
    """A grammar keeps no reference to what it was made of, and survives pickling."""
    schema = {"enum": [1]}
    grammar = Grammar.json(schema)
    schema["enum"].append(2)
    assert grammar == Grammar.json({"enum": [1]})
    assert pickle.loads(pickle.dumps(grammar)) == grammar


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json(True), "must be a JSON object.*bool True"),
        (lambda: Grammar.json(["a"]), "must be a JSON object.*list"),
        (lambda: Grammar.json({"const": {1, 2}}), "cannot be written as JSON.*set"),
        (lambda: Grammar.json({"maximum": float("inf")}), "cannot be written as JSON"),
        (lambda: Grammar.json({}, prefix=None), "the prefix.*must be a string; got NoneType"),
        (lambda: Grammar.json({}, suffix="\ud800"), r"the suffix.*valid Unicode; got '\\ud800'"),
        (lambda: Grammar.regex(""), "a regex must not be empty"),
        (lambda: Grammar.regex(b"a"), "a regex must be a string; got bytes"),
        (lambda: Grammar.lark(""), "a lark grammar must not be empty"),
        (lambda: Grammar.choice([]), "at least one option; got none"),
        (lambda: Grammar.choice(["a", ""]), "an option of a choice must not be empty"),
        (lambda: Grammar.choice(["a", 1]), "an option of a choice must be a string; got int 1"),
        (lambda: Grammar.choice("yes"), "must be a list of strings; got the string 'yes'"),
        (lambda: GenerationConfig(grammar={"type": "object"}), "must be a Grammar.*got dict"),
    ],
)
def test_grammar_is_refused_when_no_model_is_needed_to_see_the_fault(make, message):
    """A value that can never be compiled is refused where it is made."""
    with pytest.raises(ConfigError, match=message):
        make()


def test_schema_is_refused_when_it_contains_itself():
    """A circular schema is refused, not followed."""
    schema = {}
    schema["items"] = schema
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        Grammar.json(schema)


def test_long_grammar_is_shortened_when_a_message_names_it():
    """Messages show the beginning."""
    assert str(Grammar.regex("a" * 500)) == f"regex grammar {'a' * 60}..."


# -- compiling --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json({"not": {}}), r'json grammar \{"not": \{\}\} is refused.*Unimplemented'),
        (Grammar.json({"type": 3}), "type must be a string"),
        (Grammar.json({"required": ["a"], "properties": {"a": False}, "type": "object"}), "unsat"),
        (Grammar.json({"enum": ["\ud800"]}), "is refused"),
        (Grammar.regex("(a"), r"regex grammar \(a is refused.*unclosed group"),
        (Grammar.regex("(?=a)b"), "look-ahead"),
        (Grammar.lark("start: missing"), "lark grammar.*unknown name"),
        (Grammar.lark("begin: 'a'"), "lark grammar"),
        (Grammar.json({}, prefix="a<|im_end|>"), r"'<\|im_end\|>' in the prefix.*leave it out"),
        (Grammar.json({}, suffix="<|im_end|>"), "ends an answer"),
        (Grammar.json({"$ref": "#"}), "no answer to begin.*reference that leads to itself"),
    ],
)
def test_grammar_is_refused_when_it_cannot_be_compiled(compiler, grammar, message):
    """The error says which grammar, why on one line, and what to do."""
    with pytest.raises(ConfigError, match=message) as caught:
        compiler.start(grammar)
    assert "\n" not in str(caught.value)
    assert "start: %json" not in str(caught.value)
    with pytest.raises(ConfigError):  # nothing broken is kept
        compiler.start(grammar)


def test_extra_is_named_when_llguidance_is_not_installed(monkeypatch):
    """The message tells what to install; making a grammar needs nothing."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar = Grammar.json({"type": "object"})
    with pytest.raises(MissingDependencyError, match=r"pc-rag\[structured\]"):
        compiler_of().start(grammar)


def test_grammar_is_compiled_once_when_it_comes_again(compiler):
    """Compiled grammars are kept up to the capacity, the latest used first."""
    small = compiler_of(capacity=2)
    a, b, c = (Grammar.regex(letter) for letter in "abc")
    small.start(a)
    kept = small._compiled[a]
    small.start(b)
    small.start(a)
    small.start(c)
    assert list(small._compiled) == [a, c]
    assert small._compiled[a] is kept


def test_matchers_are_independent_when_one_grammar_is_started_twice(compiler):
    """A matcher that has advanced leaves the compiled grammar and other matchers as they were."""
    grammar = Grammar.regex("abc")
    first = compiler.start(grammar)
    second = compiler.start(grammar)
    for token_id in b"abc":
        first.advance(token_id)
    assert first.is_finished
    assert allowed(second) == allowed(compiler.start(grammar)) == [ord("a")]


def test_grammars_do_not_mix_when_threads_start_them_at_once(compiler):
    """One compiler serves many threads, also for its very first grammars."""
    fresh = compiler_of()
    words = ["one", "two", "three", "four"] * 8
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda word: write(fresh, Grammar.choice([word])), words))
    assert [bytes(ids).decode() for ids in written] == words


# -- masks ------------------------------------------------------------------------------------


def test_end_is_allowed_exactly_when_the_grammar_is_complete(compiler):
    """In the middle of a word there is no end, behind it there is, and no more behind the last."""
    matcher = compiler.start(Grammar.choice(["ab", "abc"]))
    seen = []
    for token_id in b"abc":
        seen.append(allowed(matcher))
        assert not matcher.is_finished
        matcher.advance(token_id)
    assert seen == [[ord("a")], [ord("b")], [ord("c"), EOS]]
    assert matcher.is_finished


def test_every_end_is_allowed_when_a_model_has_several(compiler):
    """All ids that end a generation do so under a grammar; none does before its time."""
    several = compiler_of(eos_ids=[256, 5000])
    matcher = several.start(Grammar.regex("a+"))
    assert allowed(matcher) == [ord("a")]
    matcher.advance(ord("a"))
    assert allowed(matcher) == [ord("a"), 256, EOS]
    matcher.advance(256)
    assert matcher.is_finished


def test_answer_can_finish_when_a_model_has_no_end(compiler):
    """Without an end-of-sequence token a grammar ends where nothing can follow."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    endless = compiler_of(tokenizer)
    assert bytes(write(endless, Grammar.regex("aa"))) == b"aa"
    matcher = endless.start(Grammar.regex("a+"))
    matcher.advance(ord("a"))
    assert allowed(matcher) == [ord("a")]


def test_padding_is_forbidden_when_the_model_has_more_logits_than_tokens(compiler):
    """Ids that no tokenizer knows are never chosen, and fewer logits than tokens do no harm."""
    matcher = compiler.start(Grammar.regex(r"(.|\n)+"))
    assert not set(allowed(matcher, vocab_size=500)) & set(range(256, 500))
    assert allowed(matcher, vocab_size=500) == allowed(matcher, vocab_size=260)
    assert max(allowed(matcher, vocab_size=98)) == 97


def test_logits_are_not_modified_when_they_are_masked(compiler):
    """Scores are lent."""
    scores = torch.zeros(VOCAB_SIZE)
    compiler.start(Grammar.regex("a")).mask(scores)
    assert torch.equal(scores, torch.zeros(VOCAB_SIZE))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.choice(["<|im_end|>", "<s>"]),
        Grammar.choice(["x<|im_start|>"]),
        Grammar.regex(r"<\|im_end\|>"),
        Grammar.json({"enum": ["<|im_end|>"]}),
        Grammar.json({"type": "object", "properties": {"<s>": {"const": 1}}, "required": ["<s>"]}),
    ],
)
def test_name_of_a_control_token_is_text_when_a_grammar_holds_it(compiler, grammar):
    """Only prefix and suffix of a JSON grammar are template text."""
    ids = write(compiler, grammar, choose=max)
    assert max(ids) < 256
    assert b"<" in bytes(ids)


def test_control_token_that_is_not_special_is_forced_when_a_prefix_names_it(compiler):
    """An added token that the chat template writes is a control token, whatever its flag."""
    tokenizer = tiny_tokenizer(chat_template="<call>{{ messages }}</call>")
    tokenizer.add_tokens(["<call>", "</call>"])
    opener, closer = tokenizer.convert_tokens_to_ids(["<call>", "</call>"])
    calling = compiler_of(tokenizer)
    grammar = Grammar.json({"enum": ["<call>"]}, prefix="<call>\n", suffix="\n</call>")
    assert write(calling, grammar) == [opener, *b'\n"<call>"\n', closer]


def test_literal_is_kept_exactly_when_it_holds_characters_of_the_notation(compiler):
    """Quotes, backslashes, slashes, control characters and emoji are themselves."""
    text = 'a"b\\c/*d*/ \n\t\x01 # // %json {} \x7f é😀'
    assert bytes(write(compiler, Grammar.choice([text]))).decode() == text
    wrapped = bytes(write(compiler, Grammar.json({"const": 1}, prefix=text, suffix=text))).decode()
    assert wrapped == f"{text}1{text}"


def test_control_token_is_written_by_id_when_a_lark_grammar_wants_one(compiler):
    """Rules may place control tokens."""
    grammar = Grammar.lark(f'start: <[{OPENER}]> word\nword: "a" | "b"')
    assert write(compiler, grammar, choose=max) == [OPENER, ord("b")]


@pytest.mark.parametrize("kind", ["bpe-always", "bpe-first", "bpe-prepend", "unigram"])
def test_spaces_are_those_of_the_text_when_the_tokenizer_marks_them(compiler, kind):
    """Sentencepiece's mark for a space is a space under a grammar, and never the mark itself."""
    tokens = compiler_of(metaspace_tokenizer(kind))
    ids = write(tokens, Grammar.choice(["the cat sat"]))
    assert tokens._tokenizer.decode(ids) == "the cat sat"
    matcher = tokens.start(Grammar.regex("[ a]"))
    assert tokens._tokenizer.encode_text(" ")[0] in allowed(matcher)
    assert allowed(tokens.start(Grammar.regex("[^ ]"))) != []
    assert tokens._tokenizer.encode_text(" ")[0] not in allowed(tokens.start(Grammar.regex("[^ ]")))


def test_tokens_of_several_characters_are_used_when_the_vocabulary_has_them(compiler):
    """Where the text is forced, the tokens are those that the tokenizer makes of it."""
    merged = compiler_of(tiny_tokenizer(merges=[("n", "a"), ("na", "m"), ("nam", "e")]))
    schema = {
        "type": "object",
        "properties": {"name": {"type": "boolean"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    ids = write(merged, Grammar.json(schema))
    assert ids[2] == merged._tokenizer.encode_text("name")[0] > EOS
    assert json.loads(merged._tokenizer.decode(ids)) == {"name": False}


def few_bytes_tokenizer(characters):
    """A byte-level tokenizer that knows a few characters only."""
    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: index for index, byte in enumerate(characters.encode())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def test_error_says_so_when_the_vocabulary_cannot_write_the_grammar(compiler):
    """A character without a token ends the generation with an error, also in mid-answer."""
    few = compiler_of(few_bytes_tokenizer("{}ab"))
    assert write(few, Grammar.json()) == [0, 1]
    with pytest.raises(GenerationError, match=r"json grammar.*vocabulary of 5 tokens"):
        write(few, Grammar.json({"type": "array"}))
    with pytest.raises(GenerationError, match="behind 'ab'"):
        write(few, Grammar.regex("ab[cd]"))
    with pytest.raises(GenerationError, match="cannot go on"):
        write(few, Grammar.choice(["abc"]))


def test_token_is_refused_when_the_grammar_forbids_it(compiler):
    """A matcher never follows an answer out of its grammar."""
    matcher = compiler.start(Grammar.regex("a"))
    with pytest.raises(GenerationError, match="cannot take token 98"):
        matcher.advance(98)


# -- sampling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 1, "top_k": 1},
        {"temperature": 5.0, "seed": 1, "top_p": 0.1},
        {"repetition_penalty": 9.0},
    ],
)
def test_forbidden_tokens_are_never_chosen_when_they_are_far_likelier(compiler, options):
    """The mask comes before every other choice, so top-k and top-p act on what is left."""
    config = GenerationConfig(grammar=Grammar.choice(["yes", "no"]), **options)
    sampler = Sampler(config, torch.device("cpu"), matcher=compiler.start(config.grammar))
    logits = torch.zeros(VOCAB_SIZE)
    logits[ord("x")] = 100.0
    logits[ord("n")] = 50.0
    chosen = []
    while not sampler.is_finished:
        chosen.append(sampler.sample(logits, torch.tensor([*b"abc", *chosen])))
    assert bytes(chosen) == b"no"


def test_sampler_never_finishes_when_there_is_no_grammar():
    """Only a grammar knows that an answer is complete."""
    sampler = Sampler(GenerationConfig(), torch.device("cpu"))
    sampler.sample(torch.zeros(VOCAB_SIZE), torch.tensor([1]))
    assert not sampler.is_finished
