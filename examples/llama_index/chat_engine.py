"""A streaming chat engine with memory: a turn computes its question, not what was said before.

python examples/llama_index/chat_engine.py
"""

from __future__ import annotations

from llama_index.core import Document, SummaryIndex
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.pc_rag import CacheHitEventHandler, PcRagLLM, PromptCacheEncoder

from pc_rag.metrics import TokenKind

NOTICES = (
    """The ferry to the island leaves the mainland every hour from April to October. In winter it
leaves at nine in the morning and at four in the afternoon, and not at all on Christmas Day.""",
    """A return ticket for the ferry costs four euros. Children under six travel for free, and dogs
need a ticket of one euro, which is sold on board.""",
)
TURNS = ("How much is a return ticket for the ferry?", "When does the ferry leave in winter?")


def main() -> None:
    """Say two things, and show what each turn read from the cache."""
    with PcRagLLM(model="smollm2", max_tokens=32) as llm:
        index = SummaryIndex.from_documents(
            [Document(text=text) for text in NOTICES],
            transformations=[PromptCacheEncoder(llm=llm)],
        )
        memory = ChatMemoryBuffer.from_defaults(token_limit=4096, tokenizer_fn=llm.tokenizer)
        chat = index.as_chat_engine(chat_mode="context", llm=llm, memory=memory)

        reused = []
        for message in TURNS:
            with CacheHitEventHandler() as hits:
                print(f"you: {message}\nit: ", end="")
                for piece in chat.stream_chat(message).response_gen:
                    print(piece, end="", flush=True)
            run = hits.last_run
            if run is None or run.num_documents_hit < len(NOTICES):
                raise SystemExit(f"a notice was computed again\n{hits.report()}")
            reused.append(hits.snapshot().total.prompt_tokens.get(TokenKind.REUSED, 0))
            print(f"\n  hit {run.num_documents_hit} of {run.num_documents} notices")
            print(
                f"  read {run.num_cache_read_tokens} of {run.num_prompt_tokens} tokens, "
                f"{reused[-1]} of them as earlier turns left them"
            )
        if reused[1] <= reused[0]:
            raise SystemExit("the first turn was computed again")


if __name__ == "__main__":
    main()
