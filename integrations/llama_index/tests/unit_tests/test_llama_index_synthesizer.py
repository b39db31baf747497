"""Answers over whole nodes."""

from __future__ import annotations

import json

import pytest
from llama_index.core import PromptHelper, PromptTemplate, Settings
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.llms import MockLLM
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.llms.pc_rag import PcRagLLM, PromptCacheSynthesizer
from llama_index.llms.pc_rag.prompt_room import PADDING, PromptRoom
from pydantic import BaseModel, Field

from pc_rag.errors import GenerationError, LayoutError
from tests.support.corpora import CAT, DOG, FISH, opened, recorded
from tests.support.engines import scripted
from tests.support.llama_index_calls import shown
from tests.support.llama_index_indexes import (
    QUESTION,
    encode_nodes,
    events,
    failing,
    hit_labels,
    labels_of,
    requests_in,
    scored,
    text_nodes,
    text_of,
)

LONG = tuple(f"{text} Number {i}. " * 10 for i, text in enumerate((CAT, DOG, FISH, CAT, DOG)))
"""About 750 tokens each: no two fit a window of 2,048 with the templates."""

REFINE = PromptTemplate("NEXT {context_msg} {query_str} {existing_answer}")


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


def encoded(llm, *texts):
    nodes = text_nodes(*texts)
    encode_nodes(llm.open_corpus(), nodes)
    return nodes


async def synthesized(synthesizer, nodes, *, is_async=False, question=QUESTION):
    if is_async:
        return await synthesizer.asynthesize(question, scored(nodes))
    return synthesizer.synthesize(question, scored(nodes))


async def test_prompts_equal_those_of_compact_when_all_nodes_fit(llm):
    """A drop-in for response mode ``compact``: the same tokens reach the engine."""
    nodes = encoded(llm, f"\n{CAT}\n", "  ", DOG, FISH)
    with recorded(llm.open_corpus().engine) as requests:
        own = await synthesized(PromptCacheSynthesizer(llm), nodes)
        compact = await synthesized(get_response_synthesizer(llm), nodes)
    assert requests[0].plan.token_ids == requests[1].plan.token_ids
    assert own == compact  # text, source nodes and metadata


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_no_node_is_split_when_they_do_not_fit_one_prompt(llm, streaming, is_async):
    """Each is read whole, once, in the order of retrieval, and prompts stay in the window."""
    nodes = encoded(llm, *LONG, CAT, DOG)
    synthesizer = PromptCacheSynthesizer(llm, streaming=streaming)
    with events() as kept:
        response = await synthesized(synthesizer, nodes, is_async=is_async)
        await text_of(response)
    found = requests_in(kept)
    assert 1 < len(found) < len(nodes)
    assert [label for metrics in found for label in hit_labels(metrics)] == labels_of(nodes)
    assert all(m.prompt_tokens + 8 <= llm.metadata.context_window for m in found)
    assert response.source_nodes == scored(nodes)
    assert set(response.metadata) == {node.node_id for node in nodes}


async def test_further_prompts_refine_the_answer_when_one_was_given(llm):
    """The second prompt holds the answer of the first; the last answer is given."""
    nodes = encoded(llm, *LONG[:4])
    corpus = llm.open_corpus()
    answers = []
    with recorded(corpus.engine) as requests:
        for streaming in (False, True):
            synthesizer = PromptCacheSynthesizer(llm, streaming=streaming)
            answers.append(await text_of(await synthesized(synthesizer, nodes)))
    prompts = [shown(corpus, request) for request in requests]
    assert "existing answer" in prompts[1]
    assert "existing answer" not in prompts[0]
    assert answers[0] == answers[1]


async def test_a_prompt_is_filled_when_there_is_room(llm):
    """A second node stands in the prompt where it fits, but for the padding, and not otherwise."""
    nodes = encoded(llm)[:2]
    with events() as kept:
        await synthesized(PromptCacheSynthesizer(llm), nodes)
    needed = requests_in(kept)[0].prompt_tokens + llm.max_tokens
    for window, num_calls in ((needed + 2 * PADDING, 1), (needed - 1, 2)):
        narrow = PcRagLLM(corpus=llm.corpus, max_tokens=llm.max_tokens, context_window=window)
        # The template for refining is longer; without it there is room for one node all the same.
        synthesizer = PromptCacheSynthesizer(narrow, refine_template=REFINE)
        with events() as kept:
            await synthesized(synthesizer, nodes)
        assert len(requests_in(kept)) == num_calls


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_node_is_refused_by_name_when_it_fits_no_prompt(llm, streaming, is_async):
    """With its tokens and the limit, before any call of the model; not "Empty Response"."""
    nodes = text_nodes(CAT, "word " * 500)
    synthesizer = PromptCacheSynthesizer(llm, streaming=streaming)
    with events() as kept, pytest.raises(LayoutError, match=r"'node-1' has 2499 tokens.*room for"):
        await synthesized(synthesizer, nodes, is_async=is_async)
    assert not requests_in(kept)


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_overlong_question_is_refused_when_no_node_fits_beside_it(llm, is_async):
    """The room that is left is told."""
    with pytest.raises(LayoutError, match="room for 0 "):
        await synthesized(
            PromptCacheSynthesizer(llm), text_nodes(), question="why? " * 500, is_async=is_async
        )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError("bad"), ValueError("bad"), TypeError("bad")])
async def test_a_failure_surfaces_when_the_model_raises(llm, error, is_async):
    """It is no "Empty Response"."""
    expected = (type(error), GenerationError)
    with failing(llm.open_corpus(), error), pytest.raises(expected, match="bad"):
        await synthesized(PromptCacheSynthesizer(llm), text_nodes(), is_async=is_async)


async def test_slots_are_counted_when_positions_are_reserved():
    """A chunk takes its whole slot; prompts stay in the window."""
    with opened(position_policy="reserved", slot_tokens=500, has_retrieval=False) as corpus:
        llm = PcRagLLM(corpus=corpus, max_tokens=8)
        nodes = encoded(llm, CAT, DOG, FISH, f"{CAT} Again.", f"{DOG} Again.")
        with events() as kept:
            await synthesized(PromptCacheSynthesizer(llm), nodes)
    found = requests_in(kept)
    assert len(found) > 1
    assert [label for metrics in found for label in hit_labels(metrics)] == labels_of(nodes)


async def test_templates_are_the_users_when_they_are_given_or_updated(llm):
    """Both templates, by constructor and by ``update_prompts``."""
    nodes = encoded(llm, *LONG[:4])
    corpus = llm.open_corpus()
    ask = PromptTemplate("FIRST {context_str} {query_str}")
    given = PromptCacheSynthesizer(llm, text_qa_template=ask, refine_template=REFINE)
    updated = PromptCacheSynthesizer(llm)
    updated.update_prompts({"text_qa_template": ask, "refine_template": REFINE})
    for synthesizer in (given, updated):
        with recorded(corpus.engine) as requests:
            await synthesized(synthesizer, nodes)
        prompts = [shown(corpus, request) for request in requests]
        assert ["FIRST" in prompt for prompt in prompts] == [True, *(False for _ in prompts[1:])]
        assert ["NEXT" in prompt for prompt in prompts] == [False, *(True for _ in prompts[1:])]


class Place(BaseModel):
    """Where something is."""

    name: str


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_answer_is_an_object_when_a_class_is_given(llm, is_async):
    """``output_cls`` as with LlamaIndex's synthesizers; the nodes are hit all the same."""
    pytest.importorskip("llguidance")
    nodes = encoded(llm)
    synthesizer = PromptCacheSynthesizer(
        PcRagLLM(corpus=llm.corpus, max_tokens=60), output_cls=Place
    )
    with events() as kept, scripted(llm.open_corpus().engine, json.dumps({"name": "mat"})):
        response = await synthesized(synthesizer, nodes, is_async=is_async)
    assert isinstance(response, PydanticResponse)
    assert response.response == Place(name="mat")
    assert hit_labels(requests_in(kept)[0]) == labels_of(nodes)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_another_llm_answers_when_it_is_given(streaming, is_async):
    """Any LLM of LlamaIndex; it counts as LlamaIndex does, and nodes stay whole."""
    llm = MockLLM(max_tokens=5)
    synthesizer = PromptCacheSynthesizer(llm, streaming=streaming)
    text = await text_of(await synthesized(synthesizer, text_nodes(), is_async=is_async))
    assert text
    assert text != "Empty Response"


async def test_another_llm_is_refused_a_node_when_it_fits_no_prompt():
    """The same error, by LlamaIndex's count."""
    nodes = text_nodes("word " * 9000)
    with pytest.raises(LayoutError, match="'node-0' has"):
        await synthesized(PromptCacheSynthesizer(MockLLM(max_tokens=5)), nodes)


async def test_the_model_is_that_of_the_settings_when_none_is_given(llm, monkeypatch):
    """As with LlamaIndex's synthesizers."""
    monkeypatch.setattr(Settings, "_llm", llm)
    nodes = encoded(llm)
    with events() as kept:
        await synthesized(PromptCacheSynthesizer(), nodes)
    assert hit_labels(requests_in(kept)[0]) == labels_of(nodes)


@pytest.mark.parametrize("nodes", [[], text_nodes("  ")])
async def test_something_is_answered_when_no_node_has_text(llm, nodes):
    """As LlamaIndex: without nodes "Empty Response", with empty ones a prompt without context."""
    own = await synthesized(PromptCacheSynthesizer(llm), nodes)
    compact = await synthesized(get_response_synthesizer(llm), nodes)
    assert own == compact


async def test_an_answer_is_refined_when_one_is_handed_over(llm):
    """``get_response`` takes an answer, as agents and trees of synthesizers hand it over."""
    corpus = llm.open_corpus()
    with recorded(corpus.engine) as requests:
        PromptCacheSynthesizer(llm).get_response(QUESTION, [CAT], prev_response="On the roof.")
    assert "On the roof." in shown(corpus, requests[0])


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stream_is_refined_when_one_is_handed_over(llm, is_async):
    """It is read to its end first."""
    synthesizer = PromptCacheSynthesizer(llm)
    corpus = llm.open_corpus()

    async def pieces():
        for piece in ("On the ", "roof."):
            yield piece

    with recorded(corpus.engine) as requests:
        if is_async:
            await synthesizer.aget_response(QUESTION, [CAT], prev_response=pieces())
        else:
            former = (piece for piece in ("On the ", "roof."))
            synthesizer.get_response(QUESTION, [CAT], prev_response=former)
    assert "On the roof." in shown(corpus, requests[0])


def test_a_node_is_refused_when_the_answer_so_far_leaves_it_no_room(llm):
    """Nothing is split or cut to make room."""
    with pytest.raises(LayoutError, match="answer so far"):
        PromptCacheSynthesizer(llm).get_response(QUESTION, [CAT], prev_response="so " * 600)


async def test_the_former_answer_stays_when_a_further_prompt_says_nothing():
    """As with LlamaIndex's ``refine``."""

    class Once(MockLLM):
        answers: list[str] = Field(default_factory=lambda: ["On the mat.", ""])

        def complete(self, prompt, formatted=False, **kwargs):
            return CompletionResponse(text=self.answers.pop(0))

    llm = Once(max_tokens=5)
    nodes = text_nodes("word " * 3000, "other " * 3000)
    assert await text_of(await synthesized(PromptCacheSynthesizer(llm), nodes)) == "On the mat."
    assert llm.answers == []


@pytest.mark.parametrize("is_async", [False, True])
async def test_begin_and_end_are_told_when_an_answer_is_made(llm, is_async):
    """By LlamaIndex's events, once each."""
    with events() as kept:
        await synthesized(PromptCacheSynthesizer(llm), text_nodes(), is_async=is_async)
    names = [event.class_name() for event in kept]
    assert names.count("GetResponseStartEvent") == names.count("GetResponseEndEvent") == 1


async def test_separators_are_counted_when_many_short_nodes_fill_prompts(llm):
    """Dozens of them are more than the padding."""
    nodes = text_nodes(*(f"Short note {i}." for i in range(100)))
    synthesizer = PromptCacheSynthesizer(
        PcRagLLM(corpus=llm.corpus, max_tokens=8), refine_template=REFINE
    )
    with events() as kept:
        await synthesized(synthesizer, nodes)
    found = requests_in(kept)
    assert len(found) > 1
    assert all(m.prompt_tokens + 8 <= llm.metadata.context_window for m in found)


def test_room_is_the_models_when_it_answers_with_objects(llm):
    """A structured model counts as the one within it."""
    prompt, arguments = PromptTemplate("ASK {context_str} {query_str}"), {"query_str": QUESTION}
    helper = PromptHelper()
    rooms = [
        PromptRoom(each, helper).of(prompt, arguments | {"context_str": ""})
        for each in (llm, llm.as_structured_llm(Place))
    ]
    assert rooms[0] == rooms[1] < llm.metadata.context_window
