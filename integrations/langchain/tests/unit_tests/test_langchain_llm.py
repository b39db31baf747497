"""The string model: prompts as they are, with the same powers."""

from __future__ import annotations

import pytest
from langchain_core.prompts import PromptTemplate
from langchain_pc_rag import PcRagLLM

from pc_rag.errors import ConfigError
from tests.support.corpora import CAT, DOG, recorded
from tests.support.engines import scripted

PROMPT = f"Context: {CAT}\n\n{DOG}\n\nQ: Where did the cat sit?\nA:"


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


def generation(llm, prompt, **kwargs):
    return llm.generate([prompt], **kwargs).generations[0][0]


def test_prompt_reaches_the_model_as_it_is_when_it_is_a_string(corpus, llm):
    """No chat template, nothing added."""
    with recorded(corpus.engine) as requests:
        llm.invoke(PROMPT)
    (request,) = requests
    assert corpus.engine.loaded.tokenizer.decode(request.plan.token_ids) == PROMPT


async def test_every_way_gives_one_answer_when_the_prompt_is_the_same(llm):
    """Pitfall 17: invoke, stream, batch, and their asynchronous twins."""
    expected = llm.invoke(PROMPT)
    assert expected != ""
    assert "".join(llm.stream(PROMPT)) == expected
    assert llm.batch([PROMPT, "a"])[0] == expected
    assert await llm.ainvoke(PROMPT) == expected
    assert "".join([piece async for piece in llm.astream(PROMPT)]) == expected
    assert (await llm.abatch([PROMPT, "a"]))[0] == expected


def test_chunks_are_hits_when_the_prompt_holds_them(llm):
    """Generation info tells each, and usage counts them."""
    info = generation(llm, PROMPT).generation_info
    modules = [m for m in info["pc_rag"]["modules"] if m["label"] != "(prefix)"]
    assert [m["hit_kind"] for m in modules] == ["composed", "composed"]
    assert info["usage"]["input_token_details"]["cache_read"] > 100
    assert info["finish_reason"] in {"stop", "length"}


def test_output_sums_tokens_when_several_prompts_are_generated(llm):
    """As LangChain's own callbacks read it."""
    result = llm.generate(["abc", "de"], max_tokens=2)
    usage = result.llm_output["token_usage"]
    assert usage["prompt_tokens"] == 5
    assert usage["total_tokens"] == 5 + usage["completion_tokens"]
    assert result.llm_output["model_name"] == llm.host.model_name


@pytest.mark.parametrize("how", ["call", "bind", "constructor", "stream"])
def test_stop_cuts_when_it_is_given_anywhere(corpus, how):
    """Pitfall 18, on the string model."""
    llm = PcRagLLM(corpus=corpus, stop=["\nQ:"] if how == "constructor" else None)
    with scripted(corpus.engine, "on the mat\nQ: next"):
        if how == "stream":
            answer = "".join(llm.stream("Hi", stop=["\nQ:"]))
        elif how == "bind":
            answer = llm.bind(stop=["\nQ:"]).invoke("Hi")
        else:
            answer = llm.invoke("Hi", stop=["\nQ:"] if how == "call" else None)
    assert answer == "on the mat"


def test_calls_have_settings_of_their_own_when_they_give_them(corpus):
    """Pitfall 22: length by call, and unknown names refused."""
    llm = PcRagLLM(corpus=corpus, max_tokens=50)
    with scripted(corpus.engine, "abcdefgh"):
        assert generation(llm, "Hi", max_tokens=3).generation_info["finish_reason"] == "length"
    with pytest.raises(ConfigError, match="best_of=2"):
        llm.invoke("Hi", best_of=2)


def test_false_start_of_a_stop_is_released_when_it_goes_on_otherwise(corpus):
    """Pitfall 18, on the string model."""
    llm = PcRagLLM(corpus=corpus, stop=["\nQ:"])
    for ask in (llm.invoke, lambda prompt: "".join(llm.stream(prompt))):
        with scripted(corpus.engine, "on the mat\nQuite so"):
            assert ask("Hi") == "on the mat\nQuite so"


def test_stop_of_a_call_takes_the_place_of_the_constructors_when_both_are_given(corpus):
    """The nearer setting wins."""
    llm = PcRagLLM(corpus=corpus, stop=["b"])
    with scripted(corpus.engine, "abcd"):
        assert llm.invoke("Hi", stop=["d"]) == "abc"


def test_usage_is_told_once_when_a_stream_is_summed(llm):
    """On the last piece, with the sum of both kinds of tokens."""
    *pieces, last = llm._stream(PROMPT)
    usage = last.generation_info["usage"]
    assert all(piece.generation_info is None for piece in pieces)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] == len(PROMPT)


def test_chain_is_held_to_json_when_a_call_asks_for_it(corpus):
    """The string model has no tools, but formats."""
    llm = PcRagLLM(corpus=corpus, max_tokens=200)
    choice = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    chain = PromptTemplate.from_template("{q}") | llm.bind(response_format=choice)
    assert chain.invoke({"q": "Is it?"}) in {'"yes"', '"no"'}


def test_tokens_are_the_models_when_they_are_counted(llm):
    """No tokenizer of another model."""
    assert llm.get_num_tokens("abc") == 3
