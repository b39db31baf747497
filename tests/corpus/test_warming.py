"""Warming brings entries near, in the background, and never gets in the way."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

import pytest

from pc_rag.corpus import Corpus, Document, PromptFormat, chunk_id_of
from pc_rag.corpus.warming import MAX_PENDING
from pc_rag.errors import PromptError, StoreError, StoreFull
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.tiered_store import TieredStore
from pc_rag.types import Tier
from tests.support.corpora import CAT, DOG, FISH, SHORT, TEXTS, chunk_uses, opened, tiny_engine
from tests.support.scaffolds import CAT_ID, DOG_ID
from tests.support.scaffolds import prompt as asked_of

WAIT_SECONDS = 60

ENOUGH_SECONDS = 20
"""For what takes no time; less than what holds the background waits for, so that a test fails."""


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


@pytest.mark.parametrize(
    ("texts", "num_near"),
    [([DOG, CAT], 4), ([f"{CAT} and {DOG}"], 4), ([CAT, FISH], 3), ([DOG], 2)],
)
def test_scaffold_is_near_when_all_its_chunks_were_warmed(tmp_path, texts, num_near):
    """Beside the prefix and the chunks' own entries; not where one of its chunks is missing."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add(TEXTS)
        corpus.scaffold([CAT_ID, DOG_ID])
    with opened(tmp_path, has_retrieval=False) as corpus:
        warmed(corpus, texts)
        assert corpus.engine.store.stats()[0].num_entries == num_near
        tiers = tiers_of(corpus, asked_of(corpus, CAT, DOG))
        assert tiers == [Tier.HOST if num_near == 4 else Tier.DISK] * 2


def test_missing_entries_of_scaffolds_are_encoded_when_they_are_warmed(corpus):
    """Behind every prefix; the next requests have hits only."""
    corpus.scaffold([CAT_ID, DOG_ID])
    corpus.adopt_prefix("Read: ").result(WAIT_SECONDS)
    prompts = [f"{head}{CAT}\n\n{DOG} Why?" for head in ("", "Read: ")]
    for each in prompts:
        for part in corpus.plan(each).plan.cached:
            corpus.engine.store.remove(part.key)
    assert warmed(corpus, [CAT, DOG]) == 2
    for each in prompts:
        assert all(use.is_hit for use in chunk_uses(corpus.generate(each, SHORT)))
    assert corpus.scaffold([CAT_ID, DOG_ID]).num_encoded == 0


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


def test_work_is_done_once_when_calls_wait_with_the_same_texts(corpus, gate, monkeypatch):
    """And again for a call that comes once the first has begun."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    run, runs = corpus._warmer._run, []
    monkeypatch.setattr(corpus._warmer, "_run", lambda texts: [runs.append(texts), run(texts)][1])
    waiting = [corpus.warm(texts) for texts in ([CAT, DOG], [DOG, CAT, DOG], [FISH])]
    opens.set()
    assert [future.result(WAIT_SECONDS) for future in waiting] == [2, 2, 1]
    assert runs == [{CAT, DOG}, {FISH}]


def test_other_callers_are_served_when_one_of_the_same_texts_cancels(corpus, gate):
    """Each has a future of its own, whoever came first."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    first, second, third = (corpus.warm([CAT]) for _ in range(3))
    assert first.cancel()
    assert third.cancel()
    opens.set()
    assert second.result(WAIT_SECONDS) == 1


def test_error_reaches_every_caller_when_warming_the_same_texts_fails(corpus, gate, monkeypatch):
    """None of them waits for ever."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    waiting = [corpus.warm([CAT]) for _ in range(2)]

    def fail(texts):
        raise StoreError("the store is gone")

    monkeypatch.setattr(corpus._warmer, "_run", fail)
    opens.set()
    for future in waiting:
        with pytest.raises(StoreError, match="is gone"):
            future.result(WAIT_SECONDS)


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


def ends_in_time(corpus, work):
    """Whether ``work`` ends; where it does not, the fixtures can end still."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(ENOUGH_SECONDS)
    if thread.is_alive():
        corpus._warmer._lock = threading.Lock()  # the other is held for ever
        return False
    return True


def test_nothing_is_locked_when_a_crowded_out_future_calls_back(corpus, gate):
    """Cancelling runs the callbacks of a future, and they may warm something else."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    again = []
    oldest = corpus.warm([DOG])
    oldest.add_done_callback(lambda _: again.append(corpus.warm([CAT])))

    def crowd():
        for number in range(MAX_PENDING):
            corpus.warm([f"{number}"])

    assert ends_in_time(corpus, crowd)
    assert oldest.cancelled()
    opens.set()
    assert again[0].result(WAIT_SECONDS) == 1


def test_nothing_is_locked_when_a_future_calls_back_while_the_corpus_is_closed(corpus, gate):
    """It is told that the corpus is closed."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    refused = []

    def warm_again(_):
        try:
            corpus.warm([CAT])
        except StoreError as error:
            refused.append(error)
        opens.set()  # what runs can end, and closing with it

    corpus.warm([DOG]).add_done_callback(warm_again)
    assert ends_in_time(corpus, corpus.close)
    assert len(refused) == 1


def test_cancelled_calls_take_no_place_when_many_wait(corpus, gate):
    """Who gave up crowds nobody out."""
    held, opens = gate
    corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    wanted = corpus.warm([CAT])
    for number in range(2 * MAX_PENDING):
        assert corpus.warm([f"{number}"]).cancel()
    opens.set()
    assert wanted.result(WAIT_SECONDS) == 1


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


@contextmanager
def closing(corpus, opens):
    """Closes the corpus meanwhile; what is held is let go at the end, whatever happens."""
    closer = threading.Thread(target=corpus.close, daemon=True)
    closer.start()
    try:
        yield
    finally:
        opens.set()
        closer.join(WAIT_SECONDS)
    assert not closer.is_alive()


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
    with closing(corpus, opens), pytest.raises(CancelledError):
        waiting.result(ENOUGH_SECONDS)
    assert running.result(WAIT_SECONDS) == 1


def test_waiting_calls_are_cancelled_when_the_corpus_is_closed(corpus, gate):
    """What runs ends; nothing is left behind, and later calls are refused."""
    held, opens = gate
    running = corpus.warm([FISH])
    assert held.wait(WAIT_SECONDS)
    waiting = [corpus.warm(texts) for texts in ([CAT], [DOG], [CAT])]
    with closing(corpus, opens):
        for future in waiting:
            with pytest.raises(CancelledError):
                future.result(ENOUGH_SECONDS)
    assert running.done()
    with pytest.raises(StoreError, match="closed"):
        corpus.warm([CAT])


CLOSED = "the corpus is closed; open it again to warm its chunks"

ENDING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pc_rag.errors import StoreError
from tests.support.corpora import CAT, DOG, FISH, TEXTS, opened

context = opened(has_retrieval=False)
corpus = context.__enter__()
corpus.add(TEXTS)
held, probe = threading.Event(), ThreadPoolExecutor(1)
warm_chunk = corpus._warmer._warm_chunk

def wait(chunk_id, text):
    held.set()
    try:
        while True:  # until the process ends: then no pool takes anything any more
            probe.submit(int).result()
    except RuntimeError:
        warm_chunk(chunk_id, text)

def when_ended(future):
    print("cancelled" if future.cancelled() else future.result(), flush=True)
    try:
        corpus.warm([FISH])
    except StoreError as error:
        print(error, flush=True)

corpus._warmer._warm_chunk = wait
corpus.warm([f"{CAT} {DOG} {FISH}"]).add_done_callback(when_ended)
held.wait()
corpus.warm([DOG]).add_done_callback(when_ended)
corpus.warm([CAT]).add_done_callback(when_ended)
"""


def test_waiting_calls_are_cancelled_when_the_process_ends_without_closing():
    """Its exit waits for one chunk, not for all that was asked for; nobody's future stays open."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS * 2,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["1", *["cancelled", CLOSED] * 2]


@pytest.mark.parametrize("texts", [None, 7, [CAT, 1], [None], [b"text"]])
def test_call_is_refused_when_it_is_given_no_texts(corpus, texts):
    """At once, with what was found."""
    with pytest.raises(PromptError, match=r"warm: .* pass a list of texts"):
        corpus.warm(texts)


def test_single_text_is_refused_when_a_list_is_wanted(corpus):
    """Each character would be a text."""
    with pytest.raises(PromptError, match="list"):
        corpus.warm(CAT)


def test_nothing_stays_in_the_store_when_a_chunk_is_collected_while_it_is_encoded(
    corpus, monkeypatch
):
    """Nobody would know of its entry any more."""
    text = "It is about to go, this one."
    corpus.add([Document(text, id="gone", is_whole=True)])
    (key,) = corpus._ingest.entries_of(chunk_id_of(text))
    assert corpus.engine.store.remove(key)
    num_before = corpus.engine.store.stats()[0].num_entries
    encode = corpus.engine.source.encode

    def collect_first(*arguments, **keywords):
        corpus.remove("gone")
        assert corpus.gc().num_chunks == 1
        return encode(*arguments, **keywords)

    monkeypatch.setattr(corpus.engine.source, "encode", collect_first)
    assert warmed(corpus, [text]) == 1
    assert corpus.engine.store.stats()[0].num_entries == num_before


def test_warmed_entry_goes_with_its_chunk_when_it_is_collected(corpus):
    """What warming encoded is noted, so nothing stays in the store."""
    (part, *_) = (p for p in corpus.plan(CAT).plan.cached if p.label != "(prefix)")
    corpus.engine.store.remove(part.key)
    assert warmed(corpus, [CAT]) == 1
    for record in corpus._catalog.documents():
        corpus.remove(record.id)
    assert corpus.gc().num_entries == 3
    assert corpus.engine.store.stats()[0].num_entries == 1
