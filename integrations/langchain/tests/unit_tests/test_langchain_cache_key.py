"""LangChain's response caches are keyed by everything that changes an answer."""

from __future__ import annotations

from langchain_pc_rag import ChatPcRag

from pc_rag.config import EngineConfig


def test_identity_tells_models_apart_when_a_setting_changes_answers(corpus, tiny_folder):
    """Response caches are keyed by it."""
    kinds = [
        ChatPcRag(corpus=corpus),
        ChatPcRag(corpus=corpus, max_tokens=3),
        ChatPcRag(corpus=corpus, temperature=1.0),
        ChatPcRag(corpus=corpus, seed=3),
        ChatPcRag(corpus=corpus, stop=["x"]),
        ChatPcRag(corpus=corpus, reuse=False),
        ChatPcRag(model=str(tiny_folder)),
        ChatPcRag(model=str(tiny_folder), engine_config=EngineConfig(repair="link:4")),
        ChatPcRag(model=str(tiny_folder), dtype="bfloat16"),
    ]
    assert len({str(llm.asdict()) for llm in kinds}) == len(kinds)
