"""LangChain: one chain on langchain-huggingface's pipeline and on ours, and the adapter's own cost.

What is measured, first: the time from a chain's start, retrieval included, to the first piece of
text, for the same chain (retriever | prompt | model), the same weights, chunks and questions, in
one process, with each model in turn. The chunks were encoded when they were added; the chain's own
head was learned. Round 0 is a warm-up. Each question's prompt is prefilled by the pipeline each
time, as it keeps nothing; ours keeps the exact prefix cache off here, so that a question that was
asked before is no advantage.

Second: what the adapter adds to the engine, on a tiny random model: `ChatPcRag.invoke` against
`Corpus.generate` of the same conversation, and the same for a stream, for each token.

What is not measured: answer quality, several requests at once, the disk tier.

Checked: without reuse, greedy answers equal the pipeline's wherever both see the same tokens (ours
tokenises each chunk by itself, so some prompts differ at the borders of chunks; how many answers
are the same is in the JSON), and every retrieved chunk is a hit.

    python benchmarks/langchain_adapter.py [--chunks 4 8] [--rounds 4] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import adapters
from adapters import CHUNK_CHARS, MAX_TOKENS, STREAMED_TOKENS
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from langchain_pc_rag import ChatPcRag, PcRagEmbeddings, PromptCacheVectorStore, compare_chains
from langchain_pc_rag.messages import to_conversation
from langchain_text_splitters import RecursiveCharacterTextSplitter
from transformers import pipeline

from pc_rag.cli.demo_script import QUESTIONS, TOPICS
from pc_rag.config import EngineConfig
from pc_rag.model.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.documents import Document
    from langchain_core.language_models import BaseChatModel
    from langchain_core.runnables import Runnable

    from pc_rag.corpus import Corpus

SYSTEM = "Answer in one or two short sentences, using only this context:\n\n{context}"
SAMPLE_FIELDS = ("arm", "round_number", "question_index", "ttft_seconds", "total_seconds")


class _Prompts(BaseCallbackHandler):
    """Keeps the messages that reach a model."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def on_chat_model_start(self, _serialized: Any, messages: Any, **_: Any) -> None:
        self.messages = messages[0]


def chain_of(retriever: Runnable[str, list[Document]]) -> Callable[[BaseChatModel], Any]:
    """From a model to the chain that is compared."""
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", "{question}")])

    def joined(documents: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    def build(llm: BaseChatModel) -> Any:
        inputs = {"context": retriever | joined, "question": RunnablePassthrough()}
        return inputs | prompt | llm | StrOutputParser()

    return build


def baseline_model(dtype: str) -> ChatHuggingFace:
    """The same weights behind transformers' pipeline."""
    loaded = load_model("smollm2", dtype=dtype)
    tokenizer = loaded.tokenizer.hf_tokenizer
    generate = pipeline(
        "text-generation",
        model=loaded.model,
        tokenizer=tokenizer,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        return_full_text=False,
    )
    llm = HuggingFacePipeline(pipeline=generate)
    return ChatHuggingFace(llm=llm, model_id=loaded.model.name_or_path, tokenizer=tokenizer)


def compare(num_chunks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same chain on both models."""
    config = EngineConfig(prefix_cache_bytes=0)
    ours = ChatPcRag(
        model="smollm2", dtype=options.dtype, max_tokens=MAX_TOKENS, engine_config=config
    )
    store = PromptCacheVectorStore(InMemoryVectorStore(PcRagEmbeddings()), ours.open_corpus())
    splitter = RecursiveCharacterTextSplitter(chunk_size=CHUNK_CHARS, chunk_overlap=0)
    store.add_documents(splitter.create_documents([topics[name] for name in TOPICS]))
    build = chain_of(store.as_retriever(search_kwargs={"k": num_chunks}))
    baseline = baseline_model(options.dtype)
    num_same, num_tokens = check(ours, baseline, build)
    result = compare_chains(
        build, QUESTIONS, baseline=baseline, candidate=ours, rounds=options.rounds
    )
    if result.hit_rate != 1.0:
        raise SystemExit(f"hit rate {result.hit_rate}: a retrieved chunk was computed")
    ours.close()
    print(
        f"{num_chunks:7} {num_tokens:14.0f} {1000 * result.baseline_ttft_seconds:13.0f} "
        f"{1000 * result.candidate_ttft_seconds:9.0f} {result.ttft_ratio:7.1f}x "
        f"{result.hit_rate:9.0%}"
    )
    return {
        "num_chunks": num_chunks,
        "median_prompt_tokens": num_tokens,
        "num_same_answers_without_reuse": num_same,
        **result.to_dict(),
        "samples": [
            {name: sample.to_dict()[name] for name in SAMPLE_FIELDS} for sample in result.samples
        ],
    }


def check(
    ours: ChatPcRag, baseline: ChatHuggingFace, build: Callable[[BaseChatModel], Any]
) -> tuple[int, float]:
    """Learn the chain's head, and compare greedy answers without reuse.

    Returns:
        How many answers are the pipeline's, and the median of the prompts' tokens.
    """
    tokenizer = load_tokenizer("smollm2")
    template = tokenizer.hf_tokenizer.apply_chat_template
    num_same, counts = 0, []
    for question in QUESTIONS:
        seen = _Prompts()
        answer = build(ours.bind(reuse=False, learn_prefix=True)).invoke(
            question, config={"callbacks": [seen]}
        )
        expected = build(baseline).invoke(question)
        num_same += answer == expected
        planned = ours.open_corpus().plan(to_conversation(seen.messages)).plan.token_ids
        counts.append(len(planned))
        roles = {"system": "system", "human": "user"}
        plain = [{"role": roles[m.type], "content": m.content} for m in seen.messages]
        whole = tokenizer.hf_tokenizer(template(plain, tokenize=False, add_generation_prompt=True))
        if tuple(whole["input_ids"]) == planned and answer != expected:
            raise SystemExit(f"{question}: {answer!r} is not the pipeline's {expected!r}")
        build(ours.bind(learn_prefix=True)).invoke(question)
        if ours.prefix_learning is not None:
            ours.prefix_learning.result()
    return num_same, statistics.median(counts)


def adapter_arms(
    corpus: Corpus, system: str, question: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Our model's call of one token, and its stream."""
    llm = ChatPcRag(corpus=corpus)
    messages = [SystemMessage(system), HumanMessage(question)]
    return (
        lambda: llm.invoke(messages, max_tokens=1),
        lambda: list(llm.stream(messages, max_tokens=STREAMED_TOKENS)),
    )


def main() -> None:
    """Measure, print a table and a last line of JSON."""
    parser = argparse.ArgumentParser(description="LangChain chains on two models.")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--overhead-rounds", type=int, default=100)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    added = adapters.overhead(
        adapter_arms, head=SYSTEM.format(context=""), rounds=options.overhead_rounds
    )
    print(
        f"\n{'chunks':>7} {'prompt tokens':>14} {'pipeline ms':>13} {'ours ms':>9} {'ratio':>8} "
        f"{'hit rate':>9}"
    )
    results = [compare(num_chunks, options) for num_chunks in options.chunks]
    report = {
        "benchmark": "langchain",
        **adapters.surroundings("langchain-core", "langchain-huggingface"),
        "dtype": options.dtype,
        "overhead": added,
        "comparisons": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
