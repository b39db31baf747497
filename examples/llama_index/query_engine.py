"""A query engine over a folder of files: their KV is computed once, and read by every question.

python examples/llama_index/query_engine.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
from llama_index.llms.pc_rag import (
    CacheHitEventHandler,
    PcRagEmbedding,
    PcRagLLM,
    PromptCacheQueryEngine,
    TTFTEventHandler,
)

FILES = {
    "timetable.txt": """The ferry to the island leaves the mainland every hour from April to
October. In winter it leaves at nine in the morning and at four in the afternoon.""",
    "prices.txt": """A return ticket for the ferry costs four euros. Children under six travel for
free, and dogs need a ticket of one euro, which is sold on board.""",
    "lighthouse.txt": """The lighthouse at the north end of the island was built in 1871. It can be
climbed on Saturdays; the stairs have two hundred and eleven steps.""",
    "shop.txt": """The island has one shop, which sells bread, cheese and candles. It is closed on
Mondays and whenever the baker goes fishing.""",
}
QUESTIONS = ("How much is a return ticket for the ferry?", "When is the shop on the island closed?")


def main() -> None:
    """Ask two questions, and show answers, hits and times."""
    with TemporaryDirectory() as folder, PcRagLLM(model="smollm2", max_tokens=32) as llm:
        for name, text in FILES.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        documents = SimpleDirectoryReader(folder).load_data()
        for document in documents:  # a path that is another at each run belongs into no prompt
            document.excluded_llm_metadata_keys.append("file_path")
            document.excluded_embed_metadata_keys.append("file_path")
        index = VectorStoreIndex.from_documents(documents, embed_model=PcRagEmbedding())
        engine = PromptCacheQueryEngine.from_index(
            index, llm=llm, similarity_top_k=2, streaming=True
        )
        for question in QUESTIONS:
            with CacheHitEventHandler() as hits, TTFTEventHandler() as times:
                answer = str(engine.query(question))
            run = hits.last_run
            if run is None or run.num_documents_hit < run.num_documents:
                raise SystemExit(f"a retrieved file was computed again\n{hits.report()}")
            print(f"{question}\n  {answer.strip()}")
            print(f"  hit {run.num_documents_hit} of {run.num_documents} retrieved files")
            print(f"  read {run.num_cache_read_tokens} of {run.num_prompt_tokens} tokens")
            print(times.report())


if __name__ == "__main__":
    main()
