"""Answers under a grammar: valid to the last token, and otherwise as every answer."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.errors import ConfigError, GenerationError, MissingDependencyError
from pc_rag.metrics import Stopwatch
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.grammar import Grammar
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import FinishReason, Role
from tests.support.engines import chunk_request, scripted, tiny_engine
from tests.support.json_schemas import conforms, schemas

pytest.importorskip("llguidance", reason="needs the extra pc-rag[structured]")

PROMPT = "The quick brown fox"
EOS, OPENER = 259, 258
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 0, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
BUDGET = 600


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def constrained(grammar, **options):
    return GenerationConfig(**{"max_new_tokens": BUDGET, "grammar": grammar, **options})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@settings(max_examples=30, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_answer_is_valid_when_a_random_model_writes_under_a_schema(
    engine, temperature, schema, seed
):
    """Whatever a model would rather write, the answer parses and conforms to the schema."""
    config = constrained(Grammar.json(schema), temperature=temperature, seed=seed)
    answer = engine.generate(PROMPT, config)
    assert answer.finish_reason is FinishReason.STOP
    assert conforms(json.loads(answer.text), schema)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "temperature": 1.0},
        {"top_p": 0.01, "temperature": 2.0},
        {"min_p": 1.0, "temperature": 1.0},
        {"repetition_penalty": 3.0},
        {"repetition_penalty": 0.3, "temperature": 1.0},
    ],
)
def test_answer_is_valid_when_tokens_are_dropped_for_other_reasons_too(engine, options):
    """Processors choose among what the grammar allows; none leaves an empty choice."""
    answer = engine.generate(PROMPT, constrained(Grammar.json(PERSON), seed=3, **options))
    assert conforms(json.loads(answer.text), PERSON)


def test_json_is_written_as_templates_write_it_when_nothing_else_is_said(engine):
    """One line, with a space behind commas and colons, in the schema's order."""
    text = engine.generate(PROMPT, constrained(Grammar.json(PERSON), temperature=1.0, seed=1)).text
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert text.startswith('{"name": "')
    assert f', "age": {value["age"]}, "tags": {json.dumps(value["tags"])}' + "}" in text


def test_any_object_is_allowed_when_there_is_no_schema(engine):
    """Without a schema the answer is some JSON object."""
    with scripted(engine, '{"a": [1, {"b": null}]}'):
        answer = engine.generate(PROMPT, constrained(Grammar.json()))
    assert json.loads(answer.text) == {"a": [1, {"b": None}]}
    with scripted(engine, "[" * 9):
        opening = engine.generate(PROMPT, constrained(Grammar.json(), max_new_tokens=1))
    assert opening.text == "{"


def test_control_tokens_are_forced_when_a_prefix_names_them(engine):
    """A control token of prefix or suffix is one id; the JSON between has none."""
    grammar = Grammar.json(
        {"enum": ["<|im_start|>"]}, prefix="<|im_start|>call\n", suffix="\n<s><|im_start|>!"
    )
    answer = engine.generate(PROMPT, constrained(grammar))
    text = b'"<|im_start|>"\n'
    assert answer.token_ids == (OPENER, *b"call\n", *text, 257, OPENER, ord("!"))
    assert answer.finish_reason is FinishReason.STOP


def test_no_control_token_is_generated_when_the_model_wants_one(engine):
    """Inside a grammar control tokens are forbidden, however likely they are."""
    with scripted(engine, [OPENER] * 8):
        answer = engine.generate(PROMPT, constrained(Grammar.regex(r"(.|\n){8}")))
    assert not set(answer.token_ids) & {256, 257, OPENER, EOS}


def test_answer_ends_without_another_pass_when_only_its_end_can_follow(engine):
    """The last token of a complete grammar is not run through the model."""
    answer = engine.generate(PROMPT, constrained(Grammar.regex("abc")))
    assert answer.text == "abc"
    assert answer.finish_reason is FinishReason.STOP
    assert answer.metrics.num_decode_steps == 2


def test_end_is_allowed_when_the_grammar_is_complete_and_not_before(engine):
    """A model that wants to end must first complete the grammar, and may then."""
    with scripted(engine, [EOS, EOS, EOS]):
        answer = engine.generate(PROMPT, constrained(Grammar.regex("ab(cd)?")))
    assert answer.text == "ab"
    assert answer.finish_reason is FinishReason.STOP
    with scripted(engine, "abcd"):
        longer = engine.generate(PROMPT, constrained(Grammar.regex("ab(cd)?")))
    assert longer.text == "abcd"


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(2, FinishReason.LENGTH), (3, FinishReason.STOP)]
)
def test_reason_is_length_when_the_budget_ends_before_the_grammar(engine, num_tokens, reason):
    """An answer that is complete with its last allowed token has stopped by itself."""
    answer = engine.generate(PROMPT, constrained(Grammar.regex("abc"), max_new_tokens=num_tokens))
    assert answer.text == "abc"[:num_tokens]
    assert answer.finish_reason is reason


def test_answer_is_cut_when_a_stop_string_comes_inside_a_grammar(engine):
    """Stop strings hold under a grammar, too, also where they end it."""
    grammar = Grammar.choice(["red, green"])
    cut = engine.generate(PROMPT, constrained(grammar, stop=(", ",)))
    assert (cut.text, cut.finish_reason) == ("red", FinishReason.STOP)
    end = engine.generate(PROMPT, constrained(grammar, stop=("een", "never")))
    assert (end.text, end.finish_reason) == ("red, gr", FinishReason.STOP)
    held = engine.generate(PROMPT, constrained(grammar, stop=("green!",)))
    assert (held.text, held.finish_reason) == ("red, green", FinishReason.STOP)


def test_tokens_are_the_same_when_the_seed_is(engine):
    """A seed fixes a sampled answer; another gives another."""
    config = constrained(Grammar.json(PERSON), temperature=1.0, seed=5)
    first = engine.generate(PROMPT, config)
    assert engine.generate(PROMPT, config).token_ids == first.token_ids
    other = constrained(Grammar.json(PERSON), temperature=1.0, seed=6)
    assert engine.generate(PROMPT, other).token_ids != first.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_when_kv_is_read_instead_of_computed(engine, temperature):
    """Stored, remembered and computed prompts give one constrained answer."""
    config = constrained(Grammar.json(PERSON), temperature=temperature, seed=2)
    request = chunk_request(engine, "abc", repair="link:2")
    cold = engine.generate(request, config)
    assert conforms(json.loads(cold.text), PERSON)
    assert engine.generate(request, config).token_ids == cold.token_ids
    fresh = chunk_request(engine, "")
    computed = engine.generate(fresh, config, reuse=False)
    for _ in range(2):
        assert engine.generate(fresh, config).token_ids == computed.token_ids


def test_grammar_starts_anew_when_a_request_was_closed_early(engine):
    """A request that ends in the middle leaves nothing to the next of the same grammar."""
    config = constrained(Grammar.json(PERSON))
    whole = engine.generate(PROMPT, config)
    with engine.stream(PROMPT, config) as stream:
        assert next(stream) == "{"
        next(stream)
    assert stream.completion.finish_reason is FinishReason.CANCELLED
    with engine.stream(PROMPT, config):
        pass
    assert engine.generate(PROMPT, config).token_ids == whole.token_ids


def test_answers_equal_serial_ones_when_threads_use_several_grammars(engine):
    """Grammars of requests that interleave do not mix."""
    grammars = [
        Grammar.json(PERSON),
        Grammar.regex("[a-f]{20}"),
        Grammar.choice(["one", "two", "three"]),
        Grammar.json({"type": "integer", "minimum": 1, "maximum": 99}),
    ]
    configs = [constrained(g, temperature=1.0, seed=i) for i, g in enumerate(grammars)] * 3
    configs.append(GenerationConfig(max_new_tokens=30))
    expected = [tiny_engine().generate(PROMPT, config).token_ids for config in configs]
    fresh = tiny_engine()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda config: fresh.generate(PROMPT, config), configs))
    assert [answer.token_ids for answer in answers] == expected


def test_nothing_is_imported_when_a_request_has_no_grammar(monkeypatch):
    """Unconstrained requests work without the optional package, with the tokens of before."""
    configs = [
        GenerationConfig(max_new_tokens=20),
        GenerationConfig(max_new_tokens=20, temperature=1.0, seed=4, top_k=20),
    ]
    used = tiny_engine()
    used.generate(PROMPT, constrained(Grammar.json(PERSON)))
    expected = [used.generate(PROMPT, config).token_ids for config in configs]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bare = tiny_engine()
    assert [bare.generate(PROMPT, config).token_ids for config in configs] == expected
    with pytest.raises(MissingDependencyError, match=r"pc-rag\[structured\]"):
        bare.stream(PROMPT, constrained(Grammar.json(PERSON)))


def test_grammar_is_refused_before_anything_runs_when_it_is_not_supported(engine):
    """A keyword that cannot be held is an error at the call; no forward pass, no request."""
    before = engine.stats.snapshot().total.num_requests
    with scripted(engine, "", fail_at=0), pytest.raises(ConfigError, match=r"json grammar.*not"):
        engine.stream(PROMPT, constrained(Grammar.json({"not": {"type": "string"}})))
    assert engine.stats.snapshot().total.num_requests == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_request_fails_and_the_next_works_when_the_vocabulary_lacks_a_token(temperature):
    """A grammar that the vocabulary cannot write is an error that says so, not a loop."""
    engine = tiny_engine(vocab_size=98)  # ids 0 to 97: no letter behind "a"
    with pytest.raises(GenerationError, match="vocabulary") as caught:
        engine.generate("AB", constrained(Grammar.regex("aab"), temperature=temperature))
    assert "'aa'" in str(caught.value)
    assert engine.generate("AB", constrained(Grammar.regex("aaa"))).text == "aaa"


def test_compile_time_is_planning_when_a_request_has_a_grammar(engine):
    """Compiling is charged to the plan phase."""
    seconds = {}
    for name, grammar in (("with", Grammar.regex("a")), ("without", None)):
        watch = Stopwatch(read_clock=count().__next__)
        config = GenerationConfig(max_new_tokens=1, grammar=grammar)
        stream = engine.run(engine.plan(PROMPT), config, watch=watch)
        list(stream)
        seconds[name] = stream.completion.metrics.plan_seconds
    assert seconds["with"] > seconds["without"] == 0


@pytest.mark.slow
def test_default_model_answers_in_json_when_asked_for_a_fact(monkeypatch):
    """The real default model fills a schema with the right capital."""
    from pc_rag.engine import PromptCache  # noqa: PLC0415 - the real model's own engine

    monkeypatch.delenv("PC_RAG_CACHE_DIR", raising=False)
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 20},
            "population": {"type": "integer"},
        },
        "required": ["capital", "population"],
        "additionalProperties": False,
    }
    question = "Name the capital of France and its population, as JSON."
    with PromptCache.from_pretrained("smollm2", device="cpu") as engine:
        prompt = [ChatMessage(Role.USER, question)]
        config = constrained(Grammar.json(schema), max_new_tokens=60, repetition_penalty=1.1)
        answer = engine.generate(prompt, config)
    assert answer.finish_reason is FinishReason.STOP
    value = json.loads(answer.text)
    assert value["capital"] == "Paris"
    assert type(value["population"]) is int
