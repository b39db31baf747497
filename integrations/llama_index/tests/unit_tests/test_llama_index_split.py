"""Prompts in which LlamaIndex split a node."""

from __future__ import annotations

import pytest
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.llms.pc_rag import PcRagLLM, PromptCacheSynthesizer

from pc_rag.types import HitKind, MissReason
from tests.support.corpora import CAT, DOG, FISH, SHORT, opened, recorded
from tests.support.engines import reference_ids
from tests.support.llama_index_indexes import (
    QUESTION,
    chunks_in,
    encode_nodes,
    events,
    labels_of,
    requests_in,
    scored,
    text_nodes,
)

LONG = tuple(
    " ".join(f"{text} So it was in the year {1900 + year}." for year in range(num_years))
    for text, num_years in ((CAT, 4), (DOG, 4), (FISH, 9))
)
"""The first two and a part of the third fill a prompt."""


@pytest.fixture
def corpus():
    """Holds nothing but the nodes: no other chunk stands in their parts."""
    with opened(has_retrieval=False) as corpus:
        yield corpus


async def test_a_split_node_counts_as_partial_when_compact_cut_it(corpus):
    """Its head is read, its tail computed, and both say why (pitfall 38)."""
    nodes = text_nodes(*LONG)
    encode_nodes(corpus, nodes)
    llm = PcRagLLM(corpus=corpus, max_tokens=8)
    compact = get_response_synthesizer(llm, prompt_helper=llm.prompt_helper())
    with events() as kept, recorded(corpus.engine) as requests:
        compact.synthesize(QUESTION, scored(nodes))
    found = requests_in(kept)
    assert len(found) > 1
    split = [u for m in found for u in chunks_in(m) if u.miss_reason is MissReason.SPLIT]
    assert [(use.label, use.hit_kind) for use in split] == [
        (labels_of(nodes)[2], HitKind.PARTIAL),
        (labels_of(nodes)[2], None),
    ]
    for metrics in found:
        parts = metrics.num_cached_tokens + metrics.num_repaired_tokens + metrics.num_fresh_tokens
        assert metrics.prompt_tokens == parts
    for request in requests:
        with corpus.engine.run(request, SHORT, watch=corpus.engine.start_watch()) as stream:
            "".join(stream)
        assert stream.completion.token_ids == reference_ids(corpus.engine, request, 8)


async def test_no_node_is_partial_when_whole_nodes_are_packed(corpus):
    """What the synthesizer is for: the same nodes, none of them split."""
    nodes = text_nodes(*LONG)
    encode_nodes(corpus, nodes)
    llm = PcRagLLM(corpus=corpus, max_tokens=8)
    with events() as kept:
        PromptCacheSynthesizer(llm).synthesize(QUESTION, scored(nodes))
    uses = [use for metrics in requests_in(kept) for use in chunks_in(metrics)]
    assert [use.label for use in uses] == labels_of(nodes)
    assert all(use.is_hit and use.hit_kind is not HitKind.PARTIAL for use in uses)
