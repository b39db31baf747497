"""The chat model: one changed line in a LangChain application."""

from __future__ import annotations

import json

import pytest
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_pc_rag import ChatPcRag

from tests.support.corpora import CAT, DOG, FISH, TEXTS, opened, recorded
from tests.support.engines import scripted
from tests.support.langchain_calls import QUESTION, context_messages, modules


@pytest.fixture
def llm(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=8)


def test_answer_has_no_prompt_in_it_when_it_is_invoked_or_streamed(llm):
    """Pitfall 17: invoke gives what the joined stream gives, and the prompt is in neither."""
    prompt = "Context: A\nQ:"
    answer = llm.invoke(prompt)
    streamed = list(llm.stream(prompt))
    assert answer.content == "".join(chunk.content for chunk in streamed)
    assert not answer.content.startswith("Context")
    assert answer.content != ""


@pytest.mark.parametrize("how", ["call", "bind", "constructor", "stream"])
def test_stop_cuts_at_its_first_occurrence_when_it_is_given_anywhere(corpus, how):
    """Pitfall 18: a stop string is found across tokens, and none of it is given out."""
    text, stop = "Hello\nUser: more\nUser: again", ["\nUser:"]
    llm = ChatPcRag(corpus=corpus, stop=stop if how == "constructor" else None)
    with scripted(corpus.engine, text):
        if how == "stream":
            answer = "".join(chunk.content for chunk in llm.stream("Hi", stop=stop))
        elif how == "bind":
            answer = llm.bind(stop=stop).invoke("Hi").content
        else:
            answer = llm.invoke("Hi", stop=stop if how == "call" else None).content
    assert answer == "Hello"


def test_false_start_of_a_stop_is_released_when_it_goes_on_otherwise(corpus):
    """Pitfall 18: what only began like a stop string is part of the answer."""
    llm = ChatPcRag(corpus=corpus, stop=["\nUser:"])
    with scripted(corpus.engine, "Hello\nUsers like it"):
        assert "".join(chunk.content for chunk in llm.stream("Hi")) == "Hello\nUsers like it"


def test_stop_of_a_call_takes_the_place_of_the_constructors_when_both_are_given(corpus):
    """The nearer setting wins."""
    llm = ChatPcRag(corpus=corpus, stop=["b"])
    with scripted(corpus.engine, "abcd"):
        assert llm.invoke("Hi", stop=["d"]).content == "abc"


def test_answer_is_short_when_a_call_allows_few_tokens(corpus):
    """Pitfall 22: at most as many tokens as asked for, and the reason is said."""
    llm = ChatPcRag(corpus=corpus, max_tokens=50)
    with scripted(corpus.engine, "abcdefgh"):
        answer = llm.invoke("Hi", max_tokens=3)
    assert answer.content == "abc"
    assert answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["finish_reason"] == "length"


def test_sampling_follows_the_call_when_temperature_and_seed_are_given(llm):
    """The same seed gives the same answer, another one another."""
    settings = {"temperature": 5.0, "max_tokens": 20}
    first, again, other = (llm.invoke("Hi", seed=seed, **settings).content for seed in (1, 1, 2))
    assert first == again != other


def test_usage_equals_the_prompt_when_a_stream_is_summed(corpus, llm):
    """Pitfall 30: only one chunk counts, and details never exceed the sum."""
    messages = context_messages(CAT, DOG)
    with recorded(corpus.engine) as requests:
        chunks = list(llm.stream(messages))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    usage = total.usage_metadata
    details = usage["input_token_details"]
    assert len(chunks) >= 3
    assert usage["input_tokens"] == requests[0].plan.num_tokens
    assert 0 < details["cache_read"] <= usage["input_tokens"]
    assert sum(details.values()) <= usage["input_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert llm.invoke(messages).usage_metadata["total_tokens"] == usage["total_tokens"]
    assert total.response_metadata["model_name"] == corpus.engine.loaded.name
    assert total.chunk_position == "last"


def test_cache_creation_is_counted_when_an_entry_had_to_be_made(corpus):
    """What the store lost is encoded in the call, and said so."""
    llm = ChatPcRag(corpus=corpus, max_tokens=2)
    with recorded(corpus.engine) as requests:
        first = llm.invoke(context_messages(CAT))
    for key in requests[0].recipes:
        corpus.engine.store.remove(key)
    again = ChatPcRag(corpus=corpus, max_tokens=2).invoke(context_messages(CAT, DOG))
    assert first.usage_metadata["input_token_details"]["cache_creation"] == 0
    assert again.usage_metadata["input_token_details"]["cache_creation"] > 0
    assert "not-stored" in {module["miss_reason"] for module in modules(again)}


def test_metadata_is_plain_json_when_an_answer_is_kept(llm):
    """Histories and tracers write messages down."""
    answer = llm.invoke(context_messages(CAT))
    metadata = json.loads(json.dumps(answer.response_metadata))
    assert metadata["finish_reason"] in {"stop", "length"}
    assert metadata["ttft_seconds"] > 0
    (module,) = modules(answer)
    assert module["hit_kind"] == "composed"
    assert module["tier"] == "host"
    assert module["miss_reason"] == "other-prefix"


def test_usage_callback_sees_a_whole_chain_when_it_retrieves(corpus, llm):
    """Pitfall 31: tokens and cache reads arrive by model name."""
    chain = (
        {"context": RunnableLambda(lambda _: f"{CAT}\n\n{FISH}"), "question": RunnablePassthrough()}
        | ChatPromptTemplate.from_messages([("system", "Use: {context}"), ("human", "{question}")])
        | llm
        | StrOutputParser()
    )
    with get_usage_metadata_callback() as usage:
        chain.invoke(QUESTION)
    (found,) = usage.usage_metadata.values()
    assert list(usage.usage_metadata) == [corpus.engine.loaded.name]
    assert found["input_tokens"] > found["input_token_details"]["cache_read"] > 0


def test_template_labels_the_metrics_when_a_call_names_one(corpus, llm):
    """Hit rates can be told apart by prompt template."""
    labels = [
        llm.invoke("Hi").response_metadata["pc_rag"]["template"],
        llm.bind(template="faq").invoke("Hi").response_metadata["pc_rag"]["template"],
        ChatPcRag(corpus=corpus, max_tokens=1, template="mail")
        .invoke("Hi")
        .response_metadata["pc_rag"]["template"],
    ]
    assert labels == ["corpus", "faq", "mail"]


@pytest.mark.parametrize("separator", ["\n\n", "\n---\n", " | ", ""])
def test_chunks_are_recognised_when_a_chain_joins_them_its_own_way(llm, separator):
    """Pitfall 35: any separator, headers between, and still two hits."""
    context = separator.join(f"Source: a.txt\n{text}" for text in (CAT, DOG))
    answer = llm.invoke([SystemMessage(context), HumanMessage(QUESTION)])
    assert [module["hit_kind"] for module in modules(answer)] == ["composed", "composed"]


def test_turns_before_are_reused_when_a_conversation_goes_on(llm):
    """Turn n prefills only what is new: its question and the template's marks around it."""
    messages = [*context_messages(CAT, DOG)]
    for question in ("And the dog?", "And then?"):
        answer = llm.invoke(messages)
        spent = answer.usage_metadata
        messages += [answer, HumanMessage(question)]
        metrics = llm.invoke(messages, max_tokens=1).response_metadata["pc_rag"]
        known = spent["input_tokens"] + spent["output_tokens"]
        assert metrics["num_cached_tokens"] >= known - 1
        assert metrics["num_fresh_tokens"] < len(question) + 60


def test_head_is_learned_when_the_user_allows_it():
    """``other-prefix`` hits are reported until the chain's own head is known, then exact ones."""
    with opened() as corpus:
        corpus.add(TEXTS)
        llm = ChatPcRag(corpus=corpus, max_tokens=1, learn_prefix=True)
        before = modules(llm.invoke(context_messages(CAT, DOG)))
        assert llm.prefix_learning.result() == 3
        after = modules(llm.invoke(context_messages(DOG, CAT)))
    assert [module["miss_reason"] for module in before] == ["other-prefix"] * 2
    assert [module["hit_kind"] for module in after] == ["exact", "composed"]
    assert [module["miss_reason"] for module in after] == [None] * 2


def test_nothing_is_learned_when_the_user_did_not_allow_it(corpus, llm):
    """A corpus grows only by permission."""
    llm.invoke(context_messages(CAT))
    assert llm.prefix_learning is None
    assert len(corpus.prefixes) == 1


def test_answers_are_the_same_when_reuse_is_off(corpus):
    """The uncached arm is one keyword away, for exact hits with the same tokens."""
    llm = ChatPcRag(corpus=corpus, max_tokens=8)
    head = {"role": "system", "content": context_messages("")[0].content}
    corpus.adopt_prefix([head]).result()
    on, off = (llm.invoke(context_messages(CAT), reuse=reuse) for reuse in (True, False))
    assert on.content == off.content
    assert off.usage_metadata["input_token_details"] == {"cache_read": 0, "cache_creation": 0}
    assert [module["miss_reason"] for module in modules(off)] == ["reuse-off"]


def test_tokens_are_the_models_when_they_are_counted(corpus, llm):
    """No tokenizer of another model, and the template's tokens are in it."""
    messages = context_messages(CAT)
    assert llm.get_num_tokens("abc") == 3
    assert (
        llm.get_num_tokens_from_messages(messages)
        == llm.invoke(messages, max_tokens=1).usage_metadata["input_tokens"]
    )
