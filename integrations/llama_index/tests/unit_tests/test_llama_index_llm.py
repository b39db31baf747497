"""One answer by all eight ways: the same tokens, the same text, and honest numbers."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.corpus import Corpus
from pc_rag.errors import ConfigError, GenerationTimeoutError, PromptCacheError, PromptError
from pc_rag.metrics import RequestMetrics
from pc_rag.types import HitKind, MissReason
from tests.support.corpora import CAT, DOG, loaded_model, recorded, tiny_engine
from tests.support.engines import scripted
from tests.support.llama_index_calls import STREAMS, WAYS, ask, modules, pieces, shown, text_of

QUESTION = f"Use this: {CAT}\n\nWhere did the cat sit?"


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


async def test_same_tokens_reach_the_engine_when_a_prompt_comes_by_any_way(llm, corpus):
    """Pitfall 23: complete, chat, their streams and twins ask the same and answer the same."""
    with recorded(corpus.engine) as requests:
        answers = [text_of(await ask(llm, way, QUESTION)) for way in WAYS]
    assert len(requests) == len(WAYS)
    assert len({request.plan.token_ids for request in requests}) == 1
    assert set(answers) == {answers[0]} != {""}


@pytest.mark.parametrize("formatted", [True, False])
async def test_prompt_has_one_bos_when_the_tokenizer_adds_one(way, formatted):
    """Pitfall 20: exactly one, with the chat template and without it."""
    with (
        tiny_engine(loaded=loaded_model(add_bos=True)) as engine,
        Corpus(engine, None, has_retrieval=False) as corpus,
    ):
        corpus.add([CAT])
        llm = PcRagLLM(corpus=corpus, max_tokens=2)
        options = {"formatted": formatted} if "complete" in way else {}
        with recorded(engine) as requests:
            await ask(llm, way, QUESTION, **options)
    ids = requests[0].plan.token_ids
    assert (ids.count(257), ids[0]) == (1, 257)


async def test_prompt_is_plain_text_when_it_is_formatted_already(llm, corpus):
    """``formatted=True``, by name or place: no template is put around it, and no markup is read."""
    prompt = "<|im_start|>user\nHi"
    with recorded(corpus.engine) as requests:
        llm.complete(prompt, True)
        llm.complete(prompt, formatted=True)
        llm.complete(prompt=prompt, formatted=True)
        list(llm.stream_complete(prompt, True))
    assert {shown(corpus, request) for request in requests} == {prompt}
    assert all(258 not in request.plan.token_ids for request in requests)


def test_arguments_are_taken_when_they_are_given_by_name(llm):
    """``messages=`` and ``prompt=``, as some callers write."""
    chat = llm.chat(messages=[ChatMessage(content="Hi")])
    assert text_of(chat) == text_of(llm.complete(prompt="Hi"))
    *_, last = llm.stream_chat(messages=[ChatMessage(content="Hi")])
    assert text_of(last) == text_of(chat)
    *_, last = llm.stream_complete(prompt="Hi")
    assert text_of(last) == text_of(chat)


async def test_answer_is_short_when_a_call_allows_few_tokens(corpus, way):
    """Pitfall 22: ``max_tokens`` of the call wins over the object's, and the reason is named."""
    llm = PcRagLLM(corpus=corpus, max_tokens=50)
    with scripted(corpus.engine, "abcdefgh"):
        answer = await ask(llm, way, "Hi", max_tokens=3)
    assert text_of(answer) == "abc"
    assert answer.raw["finish_reason"] == "length"
    assert answer.raw["usage"]["completion_tokens"] == 3
    with scripted(corpus.engine, "abc"):
        assert (await ask(llm, way, "Hi")).raw["finish_reason"] == "stop"


async def test_answer_is_the_joined_deltas_when_it_is_streamed(llm, corpus):
    """Each piece has all that came so far; the last one has no delta, and the numbers."""
    expected = llm.complete(QUESTION)
    for way in STREAMS:
        *said, last = await pieces(llm, way, QUESTION)
        assert "".join(piece.delta for piece in said) == text_of(last) == expected.text != ""
        assert all(piece.raw is None and piece.delta for piece in said)
        assert [text_of(a) + b.delta for a, b in pairwise(said)] == [text_of(b) for b in said[1:]]
        assert last.delta == ""
        assert last.raw["usage"] == {
            **expected.raw["usage"],
            "prompt_tokens_details": last.raw["usage"]["prompt_tokens_details"],
        }


async def test_text_is_whole_when_characters_take_several_tokens(corpus, way):
    """Pitfall 21: no piece holds half a character."""
    text = "Ein Käse für 3 €, 猫 😀"
    llm = PcRagLLM(corpus=corpus, max_tokens=100)
    with scripted(corpus.engine, text):
        said = await pieces(llm, way, "Hi")
    assert text_of(said[-1]) == text
    assert not any("\ufffd" in text_of(piece) for piece in said)


async def test_raw_is_json_and_agrees_with_the_engine_when_an_answer_ends(llm, corpus, way):
    """Numbers of the request, with its chunks; no tensors, no objects."""
    answer = await ask(llm, way, QUESTION, template="mail")
    raw = json.loads(json.dumps(answer.raw))
    metrics = RequestMetrics.from_dict(raw["pc_rag"])
    total = corpus.engine.stats.snapshot().total
    usage = raw["usage"]
    assert raw["model"] == corpus.engine.loaded.name
    assert usage["prompt_tokens"] == metrics.prompt_tokens == sum(total.prompt_tokens.values())
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == total.num_cache_read_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(CAT)
    assert raw["ttft_seconds"] == metrics.ttft_seconds > 0
    assert metrics.template == "mail"
    (module,) = modules(answer)
    assert module["hit_kind"] in {HitKind.COMPOSED, HitKind.EXACT}


async def test_tokens_are_counted_when_a_handler_listens(corpus, way):
    """Pitfall 32: LlamaIndex's counter has the true numbers, also of a stream."""
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 100_000)
    llm = PcRagLLM(corpus=corpus, max_tokens=5, callback_manager=CallbackManager([counter]))
    answer = await ask(llm, way, QUESTION)
    usage = answer.raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"] > 0


@pytest.mark.parametrize("how", ["call", "constructor", "stop_sequences"])
async def test_stop_cuts_when_it_spans_tokens(corpus, way, how):
    """Pitfall 18: at its first occurrence, whole; the call's wins over the object's."""
    stop = ["\nUser:"]
    llm = PcRagLLM(corpus=corpus, max_tokens=50, stop=stop if how == "constructor" else ["o"])
    options = {"call": {"stop": stop}, "stop_sequences": {"stop_sequences": stop}}.get(how, {})
    with scripted(corpus.engine, "Hello\nUser: more\nUser: again"):
        said = await pieces(llm, way, "Hi", **options)
    assert text_of(said[-1]) == "Hello"
    assert not any("\n" in text_of(piece) for piece in said)
    with scripted(corpus.engine, "Hello\nUsers like it"):
        assert text_of(await ask(llm, way, "Hi", stop="\nUser:")) == "Hello\nUsers like it"


async def test_sampling_is_the_calls_when_it_says_how(llm, way):
    """The same seed gives the same tokens, another seed others; greedy is the default."""
    settings = {"temperature": 5.0, "max_tokens": 20}
    first, again, other = [
        text_of(await ask(llm, way, "Hi", seed=seed, **settings)) for seed in (1, 1, 2)
    ]
    assert first == again != other
    greedy = text_of(await ask(llm, way, "Hi", max_tokens=20))
    assert greedy not in {first, other}
    assert text_of(await ask(llm, way, "Hi", max_tokens=20, temperature=0)) == greedy


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"temprature": 1}, "temprature=1 is not a setting"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature must be"),
        ({"max_tokens": 0}, "max_new_tokens"),
        ({"max_tokens": "many"}, "max_new_tokens"),
        ({"stop": [""]}, "stop strings must be non-empty"),
        ({"stop": 3}, "stop is 3"),
        ({"n": 2}, "n=2 is not a setting"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": "long"}, "timeout is 'long'"),
        ({"tool_choice": {"type": "x"}}, "tool_choice"),
        ({"response_format": "json"}, "response_format 'json' is unknown"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"model": "other-model"}, "other-model"),
        ({"seed": "x"}, "seed"),
        ({"template": 5}, "template is 5"),
        ({"reuse": "false"}, "reuse is 'false'"),
        ({"learn_prefix": "yes"}, "learn_prefix is 'yes'"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls is 'no'"),
        ({"model": 3}, "model is 3"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "is unknown"),
        ({"top_p": 2}, "top_p"),
    ],
    ids=str,
)
async def test_call_is_refused_when_a_setting_makes_no_sense(llm, way, setting, named):
    """By an error that LlamaIndex does not swallow; the model answers the next call."""
    with pytest.raises(ConfigError, match=named) as caught:
        await ask(llm, way, "Hi", **setting)
    assert not isinstance(caught.value, (ValueError, TypeError))
    assert text_of(await ask(llm, way, "Hi")) != ""


@pytest.mark.parametrize(
    "setting",
    [{"tools": []}, {"tools": None}, {"n": 1}, {"stream": True}, {"stop": None}, {"seed": None}],
    ids=str,
)
async def test_word_is_taken_when_it_changes_nothing(llm, way, setting):
    """Frameworks give names they have no value for."""
    assert text_of(await ask(llm, way, "Hi", **setting)) == text_of(llm.complete("Hi"))


async def test_call_fails_when_its_time_is_over(llm, way):
    """The error says how long was allowed, and the next call works."""
    with pytest.raises(GenerationTimeoutError, match="timeout of 1e-09 s"):
        await ask(llm, way, "Hi", timeout=1e-9)
    assert text_of(await ask(llm, way, "Hi", timeout=100)) != ""


async def test_every_token_is_computed_when_a_call_forbids_reuse(llm, way):
    """The same prompt, another arm; and the metrics say why nothing was read."""
    answer = await ask(llm, way, QUESTION, reuse=False)
    (module,) = modules(answer)
    assert module["miss_reason"] == MissReason.REUSE_OFF
    assert answer.raw["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_context_is_joined_when_a_synthesizer_gives_a_list(llm, corpus):
    """``SimpleSummarize`` hands a list over, in which no chunk would stand verbatim."""
    prompt = PromptTemplate("Context:\n{context_str}\nSay: {query_str}")
    arguments = {"context_str": [CAT, DOG], "query_str": "What?"}
    with recorded(corpus.engine) as requests:
        llm.predict(prompt, **arguments)
        list(llm.stream(prompt, **arguments))
    for request in requests:
        assert f"{CAT}\n{DOG}" in shown(corpus, request)


def test_system_prompt_comes_first_when_a_template_is_predicted(corpus):
    """As LlamaIndex does it, by the model's own system role."""
    llm = PcRagLLM(corpus=corpus, max_tokens=2, system_prompt="Be brief.")
    with recorded(corpus.engine) as requests:
        llm.predict(PromptTemplate("Say {x}."), x="hello")
    text = shown(corpus, requests[0])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hello.")


async def test_prompt_is_refused_when_it_is_longer_than_the_window(llm, way):
    """With the numbers, and by an error that LlamaIndex does not swallow."""
    with pytest.raises(PromptCacheError, match="2048"):
        await ask(llm, way, "x" * 3000)


@pytest.mark.parametrize("prompt", [None, 5, ["Hi"]], ids=str)
@pytest.mark.parametrize("formatted", [True, False])
async def test_prompt_is_refused_when_it_is_no_text(llm, prompt, formatted):
    """An empty prompt would be answered otherwise, and nobody would know."""
    for way in (each for each in WAYS if "complete" in each):
        with pytest.raises(PromptError):
            await ask(llm, way, prompt, formatted=formatted)
