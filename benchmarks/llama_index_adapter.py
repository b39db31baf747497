"""LlamaIndex: one query engine on llama-index-llms-huggingface and on ours, and the adapter's cost.

What is measured, first: the time from a query, retrieval included, to the first piece of streamed
text, for the same query engine (``index.as_query_engine(streaming=True)``, LlamaIndex's own
templates and synthesizer), the same weights, nodes and questions, in one process, with each model
in turn. The nodes were encoded when they were indexed; the prompt's own head was learned. Round 0
is a warm-up. HuggingFaceLLM keeps nothing between calls; ours keeps the exact prefix cache off
here, so that a question that was asked before is no advantage. HuggingFaceLLM's streamer holds a
word back until the next one begins: its first text comes a token or two after its first token.

Second: what the adapter adds to the engine, on a tiny random model: ``PcRagLLM.chat`` against
``Corpus.generate`` of the same conversation, and the same for a stream, for each token; with
LlamaIndex's own callbacks and events, as every call has them.

What is not measured: answer quality, several requests at once, the disk tier.

Checked: without reuse, greedy answers equal HuggingFaceLLM's wherever both see the same tokens (how
many are the same is in the JSON), and every retrieved node is a hit.

    python benchmarks/llama_index_adapter.py [--nodes 4 8] [--rounds 4] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import adapters
from adapters import MAX_TOKENS, STREAMED_TOKENS
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.huggingface import HuggingFaceLLM
from llama_index.llms.pc_rag import (
    PcRagEmbedding,
    PcRagLLM,
    PromptCacheEncoder,
    PromptCacheEvent,
)
from llama_index.llms.pc_rag.messages import to_conversation
from pydantic import Field

from pc_rag.cli.demo_script import QUESTIONS, TOPICS
from pc_rag.config import EngineConfig
from pc_rag.model.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index.core.llms import LLM

    from pc_rag.corpus import Corpus
    from pc_rag.metrics import RequestMetrics

CHUNK_TOKENS = 230
"""About ``CHUNK_CHARS`` characters, as the splitter counts them."""
SYSTEM = "Answer in one or two short sentences, using only this context:\n\n"


class Heard(BaseEventHandler):
    """Keeps what models are asked, and the metrics of our model's calls."""

    metrics: list[Any] = Field(default_factory=list)
    messages: list[Any] = Field(default_factory=list)

    def handle(self, event: object, **_: Any) -> None:
        """Keep what an event tells."""
        if isinstance(event, PromptCacheEvent):
            self.metrics.append(event.request_metrics)
        elif isinstance(event, LLMChatStartEvent):
            self.messages = event.messages


@dataclass(frozen=True, slots=True)
class Sample:
    """One question, asked once."""

    arm: str
    round_number: int
    question_index: int
    ttft_seconds: float
    total_seconds: float
    answer: str
    metrics: RequestMetrics | None


def baseline_model(dtype: str) -> HuggingFaceLLM:
    """The same weights behind LlamaIndex's own adapter."""
    loaded = load_model("smollm2", dtype=dtype)
    return HuggingFaceLLM(
        model=loaded.model,
        tokenizer=loaded.tokenizer.hf_tokenizer,
        context_window=loaded.max_position,
        max_new_tokens=MAX_TOKENS,
        generate_kwargs={"do_sample": False, "pad_token_id": min(loaded.tokenizer.eos_ids)},
        is_chat_model=True,
    )


def ask(
    llm: LLM, index: VectorStoreIndex, question: str, num_nodes: int
) -> tuple[float, float, str]:
    """Seconds to the first text and to the end, and the answer."""
    engine = index.as_query_engine(llm=llm, similarity_top_k=num_nodes, streaming=True)
    start = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    for piece in engine.query(question).response_gen:
        if piece and first is None:
            first = time.perf_counter() - start
        pieces.append(piece)
    total = time.perf_counter() - start
    return (total if first is None else first), total, "".join(pieces)


def compare(num_nodes: int, options: argparse.Namespace, heard: Heard) -> dict[str, Any]:
    """The same query engine on both models."""
    config = EngineConfig(prefix_cache_bytes=0)
    ours = PcRagLLM(
        model="smollm2", dtype=options.dtype, max_tokens=MAX_TOKENS, engine_config=config
    )
    encoder = PromptCacheEncoder(corpus=ours.open_corpus())
    index = VectorStoreIndex.from_documents(
        [Document(text=topics[name], id_=name) for name in TOPICS],
        transformations=[
            SentenceSplitter(chunk_size=CHUNK_TOKENS, chunk_overlap=0, tokenizer=ours.tokenizer),
            encoder,
        ],
        embed_model=PcRagEmbedding(),
    )
    baseline = baseline_model(options.dtype)
    num_same = learn_and_check(
        ours, baseline, heard, lambda llm, q: ask(llm, index, q, num_nodes)[2]
    )
    samples: list[Sample] = []
    arms: list[tuple[str, LLM]] = [("baseline", baseline), ("candidate", ours)]
    for round_number in range(options.rounds + 1):
        for number, question in enumerate(QUESTIONS):
            arms.reverse()
            for name, llm in arms:
                heard.metrics.clear()
                first, total, answer = ask(llm, index, question, num_nodes)
                told = heard.metrics[-1] if heard.metrics else None
                samples.append(Sample(name, round_number, number, first, total, answer, told))
    ours.close()
    return summary(num_nodes, num_same, samples)


def learn_and_check(
    ours: PcRagLLM,
    baseline: HuggingFaceLLM,
    heard: Heard,
    answer_of: Callable[[LLM, str], str],
) -> int:
    """Learn the prompt's head, and compare greedy answers without reuse.

    Ends the program where they differ though both models saw the same tokens. Ours tokenises each
    chunk by itself, so some prompts differ at the borders of chunks.

    Returns:
        How many answers are the baseline's.
    """
    learning = ours.model_copy(update={"learn_prefix": True})
    uncached = ours.model_copy(update={"reuse": False})
    tokenizer = ours.host.tokenizer.hf_tokenizer
    num_same = 0
    for question in QUESTIONS:
        answer_of(learning, question)
        if learning.prefix_learning is not None:
            learning.prefix_learning.result()
        expected = answer_of(baseline, question).strip()
        answer = answer_of(uncached, question).strip()
        num_same += answer == expected
        plain = [{"role": m.role.value, "content": m.content} for m in heard.messages]
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        planned = ours.open_corpus().plan(to_conversation(heard.messages)).plan.token_ids
        if tuple(tokenizer(text)["input_ids"]) == planned and answer != expected:
            raise SystemExit(f"{question}: {answer!r} is not HuggingFaceLLM's {expected!r}")
    return num_same


def summary(num_nodes: int, num_same: int, samples: list[Sample]) -> dict[str, Any]:
    """Medians behind the warm-up; ends the program where a retrieved node was computed."""
    timed = [sample for sample in samples if sample.round_number]
    ttft = {
        arm: statistics.median(s.ttft_seconds for s in timed if s.arm == arm)
        for arm in ("baseline", "candidate")
    }
    metrics = [sample.metrics for sample in timed if sample.metrics is not None]
    uses = [use for each in metrics for use in each.modules]
    num_hits = sum(use.is_hit for use in uses)
    chunk_uses = sum(not use.label.startswith("(") for use in uses)
    if num_hits < len(uses) or chunk_uses < len(metrics) * num_nodes:
        raise SystemExit(f"{num_hits} hits of {len(uses)}: a retrieved node was computed")
    num_tokens = statistics.median(each.prompt_tokens for each in metrics)
    ratio = ttft["baseline"] / ttft["candidate"]
    print(
        f"{num_nodes:7} {num_tokens:14.0f} {1000 * ttft['baseline']:16.0f} "
        f"{1000 * ttft['candidate']:9.0f} {ratio:7.1f}x {num_hits / len(uses):9.0%}"
    )
    return {
        "num_nodes": num_nodes,
        "median_prompt_tokens": num_tokens,
        "num_same_answers_without_reuse": num_same,
        "baseline_ttft_seconds": ttft["baseline"],
        "candidate_ttft_seconds": ttft["candidate"],
        "ttft_ratio": ratio,
        "answers": [
            {"arm": s.arm, "question": QUESTIONS[s.question_index], "answer": s.answer}
            for s in samples
            if s.round_number == 0
        ],
        "samples": [
            [s.arm, s.round_number, s.question_index, s.ttft_seconds, s.total_seconds]
            for s in samples
        ],
    }


def adapter_arms(
    corpus: Corpus, system: str, question: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Our model's call of one token, and its stream."""
    llm = PcRagLLM(corpus=corpus)
    messages = [
        ChatMessage(role=MessageRole.SYSTEM, content=system),
        ChatMessage(role=MessageRole.USER, content=question),
    ]
    return (
        lambda: llm.chat(messages, max_tokens=1),
        lambda: list(llm.stream_chat(messages, max_tokens=STREAMED_TOKENS)),
    )


def main() -> None:
    """Measure, print a table and a last line of JSON."""
    parser = argparse.ArgumentParser(description="LlamaIndex query engines on two models.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--overhead-rounds", type=int, default=100)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    added = adapters.overhead(adapter_arms, head=SYSTEM, rounds=options.overhead_rounds)
    heard = Heard()
    get_dispatcher().add_event_handler(heard)
    print(
        f"\n{'nodes':>7} {'prompt tokens':>14} {'HuggingFaceLLM ms':>16} {'ours ms':>9} "
        f"{'ratio':>8} {'hit rate':>9}"
    )
    results = [compare(num_nodes, options, heard) for num_nodes in options.nodes]
    report = {
        "benchmark": "llama_index",
        **adapters.surroundings("llama-index-core", "llama-index-llms-huggingface"),
        "dtype": options.dtype,
        "overhead": added,
        "comparisons": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
