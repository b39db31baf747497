"""One query engine on HuggingFaceLLM and on PcRagLLM: the same weights, nodes and questions.

pip install llama-index-llms-huggingface
python examples/llama_index/side_by_side.py
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.huggingface import HuggingFaceLLM
from llama_index.llms.pc_rag import (
    CacheHitEventHandler,
    PcRagEmbedding,
    PcRagLLM,
    PromptCacheEncoder,
    TTFTEventHandler,
)

from pc_rag import load_model

if TYPE_CHECKING:
    from llama_index.core.llms import LLM

PAGES = ("nonlocal", "global", "with", "lambda", "try", "del")
QUESTIONS = (
    "What does the nonlocal statement do?",
    "When is the finally clause executed?",
    "What is an anonymous function called?",
)
MAX_TOKENS = 24


def baseline() -> HuggingFaceLLM:
    """The model as LlamaIndex's own adapter runs it."""
    loaded = load_model("smollm2")
    return HuggingFaceLLM(
        model=loaded.model,
        tokenizer=loaded.tokenizer.hf_tokenizer,
        context_window=loaded.max_position,
        max_new_tokens=MAX_TOKENS,
        generate_kwargs={"do_sample": False},
        is_chat_model=True,
    )


def main() -> None:
    """Ask both models in turn, and show answers, times to the first token, and hits."""
    ours = PcRagLLM(model="smollm2", max_tokens=MAX_TOKENS)
    index = VectorStoreIndex.from_documents(
        [Document(text=topics[page], doc_id=page) for page in PAGES],
        transformations=[
            SentenceSplitter(chunk_size=256, chunk_overlap=0, tokenizer=ours.tokenizer),
            PromptCacheEncoder(llm=ours),
        ],
        embed_model=PcRagEmbedding(),
    )
    models: dict[str, LLM] = {"HuggingFaceLLM": baseline(), "PcRagLLM": ours}
    times = {name: TTFTEventHandler() for name in models}
    hits = CacheHitEventHandler()
    for question in QUESTIONS:
        print(f"\n{question}")
        for name, llm in models.items():
            engine = index.as_query_engine(llm=llm, similarity_top_k=4, streaming=True)
            with times[name], hits:
                answer = str(engine.query(question))
            print(f"  {name}: {answer.strip()}")

    seconds = {}
    for name, handler in times.items():
        found = sorted(run.ttft_seconds for run in handler.runs)
        seconds[name] = found[len(found) // 2]
        print(f"\n{name}: {1000 * seconds[name]:.0f} ms from the query to the first token (median)")
    print(f"ratio: {seconds['HuggingFaceLLM'] / seconds['PcRagLLM']:.1f}x")
    print(hits.report())
    ours.close()


if __name__ == "__main__":
    main()
