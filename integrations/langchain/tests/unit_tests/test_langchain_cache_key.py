"""LangChain's response caches are keyed by everything that changes an answer."""

from __future__ import annotations

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel
from langchain_pc_rag import CacheHitHandler, CallOutcome, ChatPcRag, PcRagLLM

from pc_rag.config import EngineConfig
from tests.support.corpora import CAT
from tests.support.engines import tiny_engine
from tests.support.langchain_calls import context_messages, text_of
from tests.support.tiny_models import CHATML_TEMPLATE

CHANGES = [
    {"dtype": "bfloat16"},
    {"device": "cpu"},
    {"chat_template": CHATML_TEMPLATE + " "},
    {"max_position": 512},
    {"engine_config": EngineConfig(repair="link:4")},
    {"engine_config": EngineConfig(visibility="module")},
    {"engine_config": EngineConfig(position_policy="reserved", slot_tokens=256)},
    {"engine_config": EngineConfig(storage_dtype="float16")},
    {"engine_config": EngineConfig(reuse=False)},
    {"reuse": False},
    {"learn_prefix": True},
    {"stop": ["x"]},
    {"max_tokens": 3},
    {"temperature": 1.0},
    {"top_p": 0.5},
    {"top_k": 5},
    {"min_p": 0.5},
    {"repetition_penalty": 1.5},
    {"seed": 3},
]
"""One setting each that may change an answer."""


def key_of(llm):
    """What LangChain keys this model's answers by, where a call has no settings of its own."""
    if isinstance(llm, BaseChatModel):
        return llm._get_llm_string(stop=None)
    return str(sorted((llm.asdict() | {"stop": None}).items()))


@pytest.fixture(params=[ChatPcRag, PcRagLLM])
def kind(request):
    return request.param


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_key_is_another_when_a_setting_changes_answers(kind, tiny_folder, change):
    """No model is loaded to tell, and equal settings have an equal key."""
    settings = {"model": str(tiny_folder)}
    plain, changed, again = (kind(**settings, **each) for each in ({}, change, change))
    assert key_of(changed) == key_of(again) != key_of(plain)
    assert not plain.host.is_open


def test_key_is_another_when_the_model_or_store_is(kind, tiny_folder, other_folder, tmp_path):
    """By their names."""
    models = [
        kind(model=str(tiny_folder)),
        kind(model=str(other_folder)),
        kind(model=str(tiny_folder), store=str(tmp_path)),
    ]
    assert len({key_of(llm) for llm in models}) == 3


def test_key_is_another_when_a_lent_engine_has_other_weights(kind):
    """Their names are equal; their fingerprints are not."""
    with tiny_engine() as first, tiny_engine(seed=1) as second:
        assert key_of(kind(engine=first)) != key_of(kind(engine=second))
        assert key_of(kind(engine=first)) == key_of(kind(engine=first))


@pytest.mark.parametrize(
    "change",
    [
        {"stop": ["e"]},
        {"temperature": 5.0, "seed": 1},
        {"max_tokens": 2},
        {"repetition_penalty": 2.0},
        {"reuse": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_answer_is_not_replayed_when_another_object_differs(kind, corpus, change, way):
    """Each is computed once, then both are replayed, and each gets its own."""
    cache = InMemoryCache()
    models = [kind(corpus=corpus, cache=cache, **{"max_tokens": 9, **c}) for c in ({}, change)]

    async def ask(llm):
        return text_of(await llm.ainvoke("Hi") if way == "ainvoke" else llm.invoke("Hi"))

    def num_requests():
        return corpus.engine.stats.snapshot().total.num_requests

    first = [await ask(llm) for llm in models]
    assert num_requests() == 2
    assert [await ask(llm) for llm in models] == first
    assert num_requests() == 2


def test_stop_of_a_call_is_another_key_when_the_object_has_one(kind, corpus):
    """A call's own stop stands beside the object's, whatever their order."""
    cache = InMemoryCache()
    for own, calls in ((["a"], ["b"]), (["b"], ["a"]), (["a"], None), (None, ["a"])):
        kind(corpus=corpus, cache=cache, max_tokens=2, stop=own).invoke("Hi", stop=calls)
    assert corpus.engine.stats.snapshot().total.num_requests == 4


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_replay_is_no_hit_when_our_own_model_gave_the_answer(corpus, way):
    """Pitfall 33: the replayed metrics are of a request that was counted before."""
    llm, handler = ChatPcRag(corpus=corpus, max_tokens=4, cache=InMemoryCache()), CacheHitHandler()
    messages, config = context_messages(CAT), {"callbacks": [handler]}
    answers = [
        llm.invoke(messages, config) if way == "invoke" else await llm.ainvoke(messages, config)
        for _ in range(3)
    ]
    assert len({answer.content for answer in answers}) == 1
    assert corpus.engine.stats.snapshot().total.num_requests == 1
    assert handler.calls[CallOutcome.REPORTED] == 1
    assert handler.num_replayed == 2
    assert handler.snapshot().total.num_requests == 1
    assert (
        handler.snapshot().total.num_cache_read_tokens
        == corpus.engine.stats.snapshot().total.num_cache_read_tokens
        > 0
    )
