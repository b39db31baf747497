"""A prompt that another framework put together: its chunks are found by their text.

python examples/own_chain.py
"""

from __future__ import annotations

from pc_rag import ChatMessage, Corpus, GenerationConfig, PromptCache, Role

CHUNKS = (
    "The ferry to the island leaves every hour from April to October.",
    "In winter the ferry leaves at nine and at four; there is none on Christmas Day.",
)


def main() -> None:
    """Run a foreign prompt before and after its head was learned."""
    with PromptCache.from_pretrained("smollm2") as engine, Corpus(engine) as corpus:
        corpus.add(CHUNKS)
        context = "\n---\n".join(f"Source: timetable\nContent: {chunk}" for chunk in CHUNKS)
        prompt = [
            ChatMessage(Role.SYSTEM, f"Answer from these excerpts only.\n\n{context}"),
            ChatMessage(Role.USER, "When does the ferry leave in winter?"),
        ]
        config = GenerationConfig(max_new_tokens=24)
        for moment in ("before", "after"):
            completion = corpus.generate(prompt, config)
            print(f"{moment} learning the head: {completion.text.strip()!r}")
            for module in completion.metrics.modules:
                remark = f" ({module.miss_reason})" if module.miss_reason else ""
                print(f"  {module.num_tokens} tokens {module.hit_kind}{remark}")
            learning = corpus.learn_prefix(prompt)
            if learning is not None:
                print(f"learned: {learning.result()} chunks encoded behind this head")


if __name__ == "__main__":
    main()
