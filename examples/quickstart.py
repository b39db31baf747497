"""Index a few texts, ask a question, and see what was read instead of computed.

python examples/quickstart.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pc_rag import Corpus, Document, GenerationConfig, PromptCache

NOTES = {
    "garden": "The greenhouse is watered at six every morning. On Sundays nobody waters anything.",
    "library": "The library of the village opens at ten. Books may be kept for four weeks.",
    "bakery": "The bakery sells rye bread on Tuesdays and Fridays; a loaf costs four euros.",
}


def main() -> None:
    """Ask one question, first from stored KV, then computing every token."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        with PromptCache.from_pretrained("smollm2", store=store / "kv") as engine:
            corpus = Corpus(engine, store)
            report = corpus.add(Document(text, id=name) for name, text in NOTES.items())
            print(f"encoded {report.num_encoded} chunks, {report.num_encoded_tokens} tokens")
            config = GenerationConfig(max_new_tokens=24)
            corpus.answer("When does the library open?", k=2, config=config)  # warms up
            question = "What does a loaf of rye bread cost?"
            for reuse in (True, False):
                answer = corpus.answer(question, k=2, config=config, reuse=reuse)
                metrics = answer.completion.metrics
                print("from stored KV:" if reuse else "computed:", answer.text.strip())
                print(f"  first token after {(metrics.ttft_seconds or 0) * 1e3:.0f} ms,", end=" ")
                print(f"{metrics.num_cached_tokens} of {metrics.prompt_tokens} tokens cached")
            corpus.close()


if __name__ == "__main__":
    main()
