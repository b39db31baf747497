"""LlamaIndex's IngestionPipeline: updates and deletions, and what is encoded for them.

python examples/llama_index/ingestion.py
"""

from __future__ import annotations

from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.pc_rag import PcRagEmbedding, PcRagLLM, PromptCacheEncoder

TEXTS = {
    "harbour": "The harbour of Lind has two piers. Fishing boats lie at the northern one, and "
    "the ferry leaves from the southern pier at half past seven every morning.",
    "ferry": "A ticket for the ferry costs four euros. Children under six travel free, and a "
    "bicycle costs one euro more.",
    "inn": "The inn at the market square serves mutton stew on Thursdays. Its six rooms look out "
    "on the old lighthouse, which was switched off in 1962.",
}


def main() -> None:
    """Ingest, ingest again, edit, and drop documents."""
    llm = PcRagLLM(model="smollm2")
    encoder = PromptCacheEncoder(llm=llm)
    pipeline = IngestionPipeline(
        transformations=[
            SentenceSplitter(chunk_size=64, chunk_overlap=0, tokenizer=llm.tokenizer),
            encoder,  # behind what changes the nodes
            PcRagEmbedding(),
        ],
        docstore=SimpleDocumentStore(),
        vector_store=SimpleVectorStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    documents = [Document(text=text, doc_id=name) for name, text in TEXTS.items()]
    edited = Document(text=f"The ferry is free on Sundays. {TEXTS['ferry']}", doc_id="ferry")
    moved = Document(
        text=TEXTS["inn"],
        doc_id="inn",
        metadata={"checked": "2026-11-30"},
        excluded_llm_metadata_keys=["checked"],  # no prompt shows it
    )

    for name, batch in (
        ("first", documents),
        ("again", documents),
        ("one text edited", [documents[0], edited, documents[2]]),
        ("hidden metadata edited", [documents[0], edited, moved]),
        ("one dropped", [documents[0], edited]),
    ):
        pipeline.run(documents=batch)
        print(f"{name}: encoded {encoder.report.num_encoded}")
    print(f"removed: {encoder.reconcile(pipeline.docstore).removed}")
    print(f"reclaimed: {llm.open_corpus().gc().num_entries} entries")

    answer = llm.complete(f"{edited.text}\n\nWhen is the ferry free? Answer in one sentence.")
    usage = answer.raw["usage"]
    print(f"answer: {answer.text.strip()}")
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"from stored KV: {num_cached} of {usage['prompt_tokens']} tokens")
    llm.close()


if __name__ == "__main__":
    main()
