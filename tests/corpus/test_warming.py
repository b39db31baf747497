"""Warming brings entries near, in the background, and never gets in the way."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from pc_rag.corpus import Corpus, Document, PromptFormat, chunk_id_of
from pc_rag.corpus.warming import MAX_PENDING
from pc_rag.errors import PromptError, StoreError, StoreFull
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.tiered_store import TieredStore
from pc_rag.types import Tier
from tests.support.corpora import CAT, DOG, FISH, SHORT, TEXTS, chunk_uses, opened, tiny_engine

WAIT_SECONDS = 60


@pytest.fixture
def corpus():
    with opened(has_retrieval=False) as corpus:
        corpus.add(TEXTS)
        yield corpus


@pytest.fixture
def gate(corpus, monkeypatch):
    """Holds the background thread at the first chunk it looks for, until it is set."""
    held, opens = threading.Event(), threading.Event()
    find_whole = corpus._lookup.find_whole

    def wait(text):
        held.set()
        assert opens.wait(WAIT_SECONDS)
        return find_whole(text)

    monkeypatch.setattr(corpus._lookup, "find_whole", wait)
    yield held, opens
    opens.set()


def warmed(corpus, texts):
    return corpus.warm(texts).result(WAIT_SECONDS)


def tiers_of(corpus, prompt):
    return [use.tier for use in chunk_uses(corpus.generate(prompt, SHORT))]


def test_chunks_are_served_from_memory_when_they_were_warmed(tmp_path):
    """Those that stand in the texts, the prefix too; others stay where they are."""
    store = TieredStore([MemoryTier(1 << 30), DiskTier(tmp_path / "kv")])
    with tiny_engine(store) as engine, Corpus(engine, tmp_path, has_retrieval=False) as corpus:
        corpus.add(TEXTS)
    store.close()
    store = TieredStore([MemoryTier(1 << 30), DiskTier(tmp_path / "kv")])
    with tiny_engine(store) as engine, Corpus(engine, tmp_path, has_retrieval=False) as corpus:
        assert warmed(corpus, [f" {CAT}\n", f"{DOG} twice: {DOG}"]) == 2
        near = store.stats()[0]
        assert near.num_entries == 3
        assert tiers_of(corpus, "\n".join(TEXTS)) == [Tier.HOST, Tier.HOST, Tier.DISK]
    store.close()


def test_missing_entries_are_encoded_when_they_are_warmed(corpus):
    """Behind every prefix that chunks are encoded behind; the next request has hits only."""
    corpus.adopt_prefix("Read: ").result(WAIT_SECONDS)
    for part in corpus.plan(f"Read: {CAT} and {DOG}.").plan.cached:
        corpus.engine.store.remove(part.key)
    for part in corpus.plan(f"{CAT} and {DOG}").plan.cached:
        corpus.engine.store.remove(part.key)
    num_before = corpus.engine.store.stats()[0].num_entries
    assert warmed(corpus, [CAT, DOG]) == 2
    assert corpus.engine.store.stats()[0].num_entries == num_before + 5
    for prompt in (f"Read: {CAT} and {DOG}.", f"{CAT} and {DOG}"):
        assert all(use.is_hit for use in chunk_uses(corpus.generate(prompt, SHORT)))


def test_short_chunk_is_warmed_when_the_text_is_the_chunk(corpus):
    """Recognition passes over it; named as a whole it is known."""
    corpus.add([Document("ok", is_whole=True)])
    assert warmed(corpus, [" ok "]) == 1
    assert warmed(corpus, ["x ok x"]) == 0


def test_nothing_is_warmed_when_no_chunk_stands_in_the_texts(corpus):
    """Unknown texts, removed chunks and no text at all are no error."""
    corpus.add([Document("It is about to go, this one.", id="gone")])
    assert corpus.remove("gone")
    assert warmed(corpus, ["unknown", "It is about to go, this one."]) == 0
    assert warmed(corpus, []) == 0


def test_calls_are_one_when_they_wait_with_the_same_texts(corpus, gate):
    """And another once the first has begun."""
    held, opens = gate
    first = corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    waiting = corpus.warm([CAT, DOG])
    assert corpus.warm([DOG, CAT, DOG]) is waiting
    assert corpus.warm([FISH]) is not first
    opens.set()
    assert waiting.result(WAIT_SECONDS) == 2


def test_another_call_begins_when_the_waiting_one_was_cancelled(corpus, gate):
    """A caller who cancels takes nothing from those who come later."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    assert corpus.warm([CAT]).cancel()
    again = corpus.warm([CAT])
    opens.set()
    assert again.result(WAIT_SECONDS) == 1


def test_oldest_call_is_cancelled_when_too_many_wait(corpus, gate):
    """The background is bounded."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    waiting = [corpus.warm([f"{number} {CAT}"]) for number in range(MAX_PENDING + 1)]
    assert [future.cancelled() for future in waiting] == [True] + [False] * MAX_PENDING
    opens.set()
    assert waiting[-1].result(WAIT_SECONDS) == 1


def test_error_is_in_the_future_when_warming_fails(corpus, monkeypatch):
    """And the next call works."""

    def fail(*arguments, **keywords):
        raise StoreError("the store is gone")

    with monkeypatch.context() as patch:
        patch.setattr(corpus.engine.source, "missing", fail)
        with pytest.raises(StoreError, match="is gone"):
            warmed(corpus, [CAT])
    assert warmed(corpus, [CAT]) == 1


def test_lack_of_room_is_told_when_a_missing_entry_is_warmed(corpus, monkeypatch):
    """What the store does not take is not warm."""
    (part, *_) = (p for p in corpus.plan(CAT).plan.cached if p.label != "(prefix)")
    corpus.engine.store.remove(part.key)

    def refuse(*arguments, **keywords):
        raise StoreFull("no room")

    monkeypatch.setattr(corpus.engine.store, "put", refuse)
    with pytest.raises(StoreFull):
        warmed(corpus, [CAT])


def test_warmed_entry_is_noted_when_the_ingest_had_no_room_for_it(monkeypatch):
    """The catalog knows it from then on, also for those who collect without a model."""

    def refuse(*arguments, **keywords):
        raise StoreFull("no room")

    with opened(has_retrieval=False) as corpus:
        with monkeypatch.context() as patch:
            patch.setattr(corpus.engine.store, "put", refuse)
            assert corpus.add([CAT]).num_dropped == 1
        noted = corpus._catalog.entries.of_chunk
        assert not noted(chunk_id_of(CAT))
        assert warmed(corpus, [CAT]) == 1
        assert len(noted(chunk_id_of(CAT))) == 1


def test_former_default_stays_as_it_is_when_its_chunks_are_warmed(tmp_path):
    """Its entries are brought near where they are stored; none is made."""
    with opened(tmp_path, has_retrieval=False, prompt_format=PromptFormat(prefix="Former.")) as old:
        old.add([CAT])
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add([DOG])
        num_before = corpus.engine.store.stats()[-1].num_entries
        assert warmed(corpus, [CAT, DOG]) == 2
        assert corpus.engine.store.stats()[-1].num_entries == num_before + 1
        assert corpus.engine.store.stats()[0].num_entries == 5  # two prefixes, three chunks


def test_nothing_stays_behind_a_prefix_when_it_is_forgotten_meanwhile(corpus, monkeypatch):
    """What was just encoded behind it goes too, its own entry included."""
    corpus.adopt_prefix("Read: ").result(WAIT_SECONDS)
    for part in corpus.plan(f"Read: {CAT}").plan.cached:
        corpus.engine.store.remove(part.key)
    encode = corpus.engine.source.encode

    def forget_first(*arguments, **keywords):
        corpus.forget_prefix("Read: ")
        return encode(*arguments, **keywords)

    monkeypatch.setattr(corpus.engine.source, "encode", forget_first)
    assert warmed(corpus, [CAT]) == 1
    assert corpus.engine.store.stats()[0].num_entries == 4


def test_running_call_ends_behind_its_chunk_when_the_corpus_is_closed(corpus, monkeypatch):
    """It resolves to what it has done by then."""
    held, opens = threading.Event(), threading.Event()
    missing = corpus.engine.source.missing

    def wait(recipes):
        held.set()
        assert opens.wait(WAIT_SECONDS)
        return missing(recipes)

    monkeypatch.setattr(corpus.engine.source, "missing", wait)
    running = corpus.warm(TEXTS)
    assert held.wait(WAIT_SECONDS)
    waiting = corpus.warm([CAT])
    closer = threading.Thread(target=corpus.close)
    closer.start()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_SECONDS)
    opens.set()
    assert running.result(WAIT_SECONDS) == 1
    closer.join(WAIT_SECONDS)


def test_waiting_calls_are_cancelled_when_the_corpus_is_closed(corpus, gate):
    """What runs ends; nothing is left behind, and later calls are refused."""
    held, opens = gate
    running = corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    waiting = corpus.warm([CAT])
    closer = threading.Thread(target=corpus.close)
    closer.start()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_SECONDS)
    opens.set()
    closer.join(WAIT_SECONDS)
    assert not closer.is_alive()
    assert running.done()
    with pytest.raises(StoreError, match="closed"):
        corpus.warm([CAT])


def test_single_text_is_refused_when_a_list_is_wanted(corpus):
    """Each character would be a text."""
    with pytest.raises(PromptError, match="list"):
        corpus.warm(CAT)


def test_warmed_entry_goes_with_its_chunk_when_it_is_collected(corpus):
    """What warming encoded is noted, so nothing stays in the store."""
    (part, *_) = (p for p in corpus.plan(CAT).plan.cached if p.label != "(prefix)")
    corpus.engine.store.remove(part.key)
    assert warmed(corpus, [CAT]) == 1
    for record in corpus._catalog.documents():
        corpus.remove(record.id)
    assert corpus.gc().num_entries == 3
    assert corpus.engine.store.stats()[0].num_entries == 1
