"""The next turn of a conversation reuses the turn before it whole, its answer included."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product

import pytest

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus, Document
from pc_rag.engine import PromptCache
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.loading import wrap_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import FinishReason, Role
from tests.support.corpora import CAT, DOG, SHORT, chunk_uses
from tests.support.engines import scripted
from tests.support.tiny_models import CHATML_TEMPLATE, tiny_model, tiny_tokenizer

LETTERS = "abcdef"
MERGES = list(product(LETTERS, LETTERS))
SPOKEN_IDS = [*LETTERS.encode(), *range(260, 260 + len(MERGES))]
"""Letters and their pairs: one text has many spellings in tokens, and a tokenizer makes one."""

NUM_SEEDS = 30
END_OF_TURN_TEMPLATE = CHATML_TEMPLATE.replace("'<|im_end|>'", "'\n(end)\n<|im_end|>'")
"""Puts text between a content and the end of its turn."""


@contextmanager
def speaking(loaded):
    """Let the model choose among letters and their pairs only."""

    def suppress(_module, _args, output):
        kept = output.logits[..., SPOKEN_IDS].clone()
        output.logits.fill_(float("-inf"))
        output.logits[..., SPOKEN_IDS] = kept
        return output

    handle = loaded.model.register_forward_hook(suppress)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(scope="module", params=[CHATML_TEMPLATE, END_OF_TURN_TEMPLATE, None])
def loaded(request):
    """A model that spells as it likes, under several chat templates."""
    model, _ = tiny_model("llama", num_hidden_layers=2)
    tokenizer = tiny_tokenizer(merges=MERGES, chat_template=request.param)
    loaded = wrap_model(model, tokenizer)
    with speaking(loaded):
        yield loaded


def sampled(seed, num_tokens=12):
    return GenerationConfig(max_new_tokens=num_tokens, temperature=1.0, seed=seed)


def user(content, *chunks):
    return ChatMessage(Role.USER, content, chunks)


def second_turn(run, question, answer):
    return run([question, ChatMessage(Role.ASSISTANT, answer), user("And then?")], SHORT).metrics


def num_short(run, question, seed):
    """Tokens of turn 1, save its last, that turn 2 computed again; none if not positive."""
    first = run([question], sampled(seed))
    second = second_turn(run, question, first.text)
    wanted = first.metrics.prompt_tokens + first.metrics.num_generated_tokens - 1
    return wanted - second.num_cached_tokens


def test_turn_is_reused_whole_when_its_answer_comes_back(loaded):
    """For every spelling that a model at temperature 1 chooses; at most the last token is not."""
    with PromptCache.from_pretrained(loaded) as engine:
        short = [num_short(engine.generate, user("Say abc."), seed) for seed in range(NUM_SEEDS)]
    assert max(short) <= 0


def test_turn_is_not_reused_whole_when_answers_are_tokenised_again(loaded, monkeypatch):
    """What the memory is for: without it the tokenizer's spelling is not the model's."""
    with PromptCache.from_pretrained(loaded) as engine:
        monkeypatch.setattr(engine._machinery.answers, "token_ids_of", lambda text, behind: None)
        short = [num_short(engine.generate, user("Say abc."), seed) for seed in range(5)]
    assert max(short) > 0


def test_turn_with_chunks_is_reused_whole_when_its_answer_comes_back(loaded):
    """Composed entries stay in their places, and what was computed behind them is reused."""
    question = user(f"Read: {CAT}\n{DOG}\nok\nSay abc.", "ok")
    with (
        PromptCache.from_pretrained(loaded) as engine,
        Corpus(engine, has_retrieval=False) as corpus,
    ):
        corpus.add([CAT, DOG, Document("ok", is_whole=True)])
        short = [num_short(corpus.generate, question, seed) for seed in range(NUM_SEEDS)]
        assert max(short) <= 0
        again = corpus.generate([question], SHORT)
        uses = chunk_uses(corpus.generate([question], SHORT))
        assert len(uses) == 3
        assert all(use.is_hit for use in uses)
        assert again.metrics.num_reused_tokens


def test_answer_keeps_its_tokens_when_it_quotes_a_chunk():
    """A chunk in the model's own words is not cut out of them: their KV is held as they are."""
    loaded = wrap_model(*tiny_model("llama", num_hidden_layers=2))
    with (
        PromptCache.from_pretrained(loaded) as engine,
        Corpus(engine, has_retrieval=False) as corpus,
    ):
        corpus.add([CAT])
        with scripted(engine, f"It says: {CAT}"):
            first = corpus.generate([user("Quote.")], GenerationConfig(max_new_tokens=200))
        assert first.finish_reason is FinishReason.STOP
        second = second_turn(corpus.generate, user("Quote."), first.text)
        wanted = first.metrics.prompt_tokens + first.metrics.num_generated_tokens
        assert second.num_reused_tokens >= wanted - 1
        assert second.modules == ()


@pytest.mark.parametrize(
    ("ids", "config"),
    [
        ([*b"ab", 258, *b"cd"], GenerationConfig(max_new_tokens=50)),
        ([*b"ab cd"], GenerationConfig(max_new_tokens=50, stop=(" c",))),
    ],
    ids=["control token", "stop string"],
)
def test_answer_is_not_remembered_when_its_tokens_say_more_than_its_text(ids, config):
    """A control token that was generated, and text behind a stop string, come back to no prompt."""
    loaded = wrap_model(*tiny_model("llama", num_hidden_layers=2))
    with PromptCache.from_pretrained(loaded) as engine:
        with scripted(engine, ids):
            first = engine.generate([user("Say.")], config)
        messages = [user("Say."), ChatMessage(Role.ASSISTANT, first.text), user("So?")]
        token_ids = engine.plan(messages).plan.token_ids
        assert bytes(first.text.encode()) in bytes(i for i in token_ids if i < 256)
        assert token_ids.count(258) == 4
        assert len(engine._machinery.answers) == 0


def test_text_is_kept_when_answers_come_back(loaded):
    """The prompt reads the same with and without the memory, for any answer."""
    with PromptCache.from_pretrained(loaded) as engine:
        for seed in range(5):
            text = engine.generate([user("Say abc.")], sampled(seed)).text
            messages = [user("Say abc."), ChatMessage(Role.ASSISTANT, text), user("So?")]
            decode = loaded.tokenizer.decode
            with_memory = decode(engine.plan(messages).plan.token_ids)
            with PromptCache.from_pretrained(loaded) as other:
                without = decode(other.plan(messages).plan.token_ids)
            if loaded.tokenizer.chat_template is None:  # generated right behind the colon
                without = without.replace(f"Assistant: {text}", f"Assistant:{text}")
            assert without == with_memory


@pytest.mark.parametrize("settings", [{"reuse": False}, {"prefix_cache_bytes": 0}])
def test_nothing_is_remembered_when_nothing_is_reused(loaded, settings):
    """Without KV to go with them the tokens are of no use."""
    with PromptCache.from_pretrained(loaded, config=EngineConfig(**settings)) as engine:
        engine.generate([user("Say abc.")], sampled(0))
        assert len(engine._machinery.answers) == 0


def test_answers_stay_with_their_engine_when_another_has_the_same_model(loaded):
    """An engine is a tenant: what one has said changes no prompt of another."""
    with PromptCache.from_pretrained(loaded) as one:
        text = one.generate([user("Say abc.")], sampled(0)).text
        with PromptCache.from_pretrained(loaded, config=EngineConfig(tenant="b")) as other:
            messages = [user("Say abc."), ChatMessage(Role.ASSISTANT, text)]
            canonical = loaded.tokenizer.encode_text(text)
            plan = other.plan(messages).plan
            assert str(canonical)[1:-1] in str(plan.token_ids)


def test_prompt_keeps_its_tokens_when_its_answer_was_generated_for_another(loaded):
    """One request, one prompt: what other users of the engine have asked does not change it."""
    few_shots = [user("Say ab."), ChatMessage(Role.ASSISTANT, "abcd"), user("And?")]
    with PromptCache.from_pretrained(loaded) as engine:
        before = engine.plan(few_shots).plan.token_ids
        with scripted(engine, "abcd"):
            engine.generate([user("Something else.")], GenerationConfig(max_new_tokens=20))
        assert len(engine._machinery.answers) == 1
        assert engine.plan(few_shots).plan.token_ids == before
