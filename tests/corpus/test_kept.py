"""Kept entries: noted when they are planned, renewed when used, collected when they expire."""

from __future__ import annotations

import pytest

from pc_rag.corpus import PromptFormat
from pc_rag.corpus.cache_points import MAX_POINTS, TokenPoint
from pc_rag.corpus.catalog import Catalog
from pc_rag.corpus.garbage import collect_garbage
from pc_rag.corpus.kept import KeptEntries, collect_expired
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.model.conversation import CachePoint, ChatMessage
from pc_rag.types import Role
from tests.support.corpora import CAT, DOG, SHORT, TEXTS, chunk_uses, opened, tiny_engine

RULES = "You answer from the report below, in one short sentence."
HEAD = tuple(range(100))


class Clock:
    """A wall clock that stands still."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def catalog(tmp_path):
    with Catalog(tmp_path, tokenizer_id="t") as catalog:
        yield catalog


@pytest.fixture
def engine():
    with tiny_engine() as engine:
        yield engine


def notes(catalog):
    """When each noted entry expires, by its end."""
    values = (value.split() for value in catalog.settings("kept ").values())
    return {int(end): float(expires) for _, expires, _, end, _ in values}


def kept_conversation(ttl_seconds=300.0):
    return (
        ChatMessage(Role.SYSTEM, RULES, cache_points=(CachePoint(len(RULES), ttl_seconds),)),
        ChatMessage(Role.USER, "Who?"),
    )


def test_entries_are_noted_before_they_are_made(engine, catalog, clock):
    """A crash behind the plan leaves a note without an entry, never an entry without a note."""
    points = [TokenPoint(40, 300.0), TokenPoint(90, 60.0)]
    chain = KeptEntries(engine, catalog, clock=clock).chain(HEAD, points, ())
    assert notes(catalog) == {40: 1300.0, 90: 1060.0}
    assert engine.source.missing(link.recipe for link in chain) == [
        link.recipe.address.key for link in chain
    ]
    names = [f"kept {link.recipe.address.key}" for link in chain]
    assert sorted(names) == list(catalog.settings("kept "))


def test_earlier_entries_are_kept_as_long_as_later_ones_that_need_them(engine, catalog, clock):
    """The text up to the last point is kept for an hour: so is its beginning."""
    points = [TokenPoint(40, 300.0), TokenPoint(90, 3600.0)]
    KeptEntries(engine, catalog, clock=clock).chain(HEAD, points, ())
    assert notes(catalog) == {40: 4600.0, 90: 4600.0}


def test_time_counts_from_the_last_use_when_an_entry_is_used_again(engine, catalog, clock):
    """Renewed at every use, and written only once a tenth of the time has passed."""
    kept = KeptEntries(engine, catalog, clock=clock)
    points = [TokenPoint(40, 300.0)]
    written = []
    for now in (1000.0, 1010.0, 1029.0, 1031.0, 1050.0):
        clock.now = now
        kept.chain(HEAD, points, ())
        written.append(notes(catalog)[40] - 300.0)
    assert written == [1000.0, 1000.0, 1000.0, 1031.0, 1031.0]
    kept.chain(HEAD, [TokenPoint(40, 10.0)], ())
    assert notes(catalog)[40] == 1331.0, "a shorter time takes nothing away"


def test_no_note_is_written_twice_when_a_request_comes_soon(engine, catalog, clock, monkeypatch):
    """A request costs no disk write where nothing changed."""
    kept = KeptEntries(engine, catalog, clock=clock)
    kept.chain(HEAD, [TokenPoint(40, 300.0)], ())
    monkeypatch.setattr(catalog, "put_settings", lambda _: pytest.fail("it wrote"))
    kept.chain(HEAD, [TokenPoint(40, 300.0)], ())


def test_expired_entries_leave_the_store_when_garbage_is_collected(tmp_path, clock):
    """By the catalog and the store alone, as ``pc-rag gc`` does; what is in use by time stays."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
        metrics = corpus.generate(kept_conversation(), SHORT).metrics
        num_bytes = metrics.num_cache_creation_tokens * corpus.engine.bytes_per_token
        store, catalog = corpus.engine.store, corpus._catalog
        (expires,) = notes(catalog).values()
        clock.now = expires - 1.0
        assert collect_garbage(catalog, store, clock=clock).num_entries == 0
        assert corpus.gc().num_entries == 0
        clock.now = expires
        report = collect_garbage(catalog, store, clock=clock)
        assert (report.num_entries, report.num_bytes) == (1, num_bytes)
        assert notes(catalog) == {}
        assert collect_garbage(catalog, store, clock=clock).num_entries == 0
        again = corpus.generate(kept_conversation(), SHORT).metrics
        assert again.num_cache_creation_tokens == metrics.num_cache_creation_tokens
        assert all(use.is_hit for use in chunk_uses(corpus.answer("dog", 1, config=SHORT)))


@pytest.mark.parametrize(
    "value",
    ["", "1 2 3 4", "1 x 0 40 d", "1 nan 0 40 d", "1 inf 0 40 d", "1 9e9 40 40 d", "1 9e9 -1 40 d",
     "-1 9e9 0 40 d", f"{'9' * 5000} 9e9 0 40 d"],
    ids=lambda value: value[:16] or "empty",
)  # fmt: skip
def test_entry_is_collected_when_its_note_cannot_be_read(engine, catalog, value):
    """A note that is damaged stops nobody, and keeps nothing for ever."""
    points = [TokenPoint(40, 300.0)]
    (link,) = KeptEntries(engine, catalog).chain(HEAD, points, ())
    for _ in engine.source.encode(
        [link.recipe.address.key], {link.recipe.address.key: link.recipe}
    ):
        pass
    catalog.put_settings(dict.fromkeys(catalog.settings("kept "), value))
    assert [each.end for each in KeptEntries(engine, catalog).chain(HEAD, points, ())] == [40]
    catalog.put_settings(dict.fromkeys(catalog.settings("kept "), value))
    assert list(collect_expired(catalog, engine.store)) == [link.recipe.address.key]
    assert catalog.settings("kept ") == {}


def test_note_stays_when_its_entry_is_used_while_garbage_is_collected(engine, catalog, clock):
    """The entry that is made again meanwhile would be known to nobody otherwise."""
    kept = KeptEntries(engine, catalog, clock=clock)
    points = [TokenPoint(40, 300.0)]
    kept.chain(HEAD, points, ())
    clock.now = 1301.0

    class Store(MemoryTier):
        def remove(self, key):
            kept.chain(HEAD, points, ())  # a request comes just now
            return super().remove(key)

    assert collect_expired(catalog, Store(1 << 20), clock=clock) == {}
    assert notes(catalog) == {40: 1601.0}


def test_entry_of_a_chunk_stays_when_its_text_was_kept_too(tmp_path, clock):
    """A kept text may be a chunk behind its prefix: the same key, and the chunk needs it."""
    with opened(tmp_path, prompt_format=PromptFormat(prefix=RULES)) as corpus:
        corpus.add(TEXTS)
        rules, asked = corpus.prompt_format.messages("Who?", [DOG, CAT])
        point = CachePoint(asked.content.index(DOG) + len(DOG), 1.0)
        corpus.generate(
            (rules, ChatMessage(Role.USER, asked.content, cache_points=(point,))), SHORT
        )
        (expires,) = notes(corpus._catalog).values()
        clock.now = expires + 1.0
        report = collect_garbage(corpus._catalog, corpus.engine.store, clock=clock)
        assert report.num_entries == 0
        assert notes(corpus._catalog) == {}
        assert all(use.is_hit for use in chunk_uses(corpus.answer("dog", 1, config=SHORT)))


def test_entry_of_a_prefix_stays_when_its_text_was_kept_before(tmp_path, clock):
    """A kept text that the corpus adopts is a prefix from then on."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
        corpus.generate(kept_conversation(), SHORT)
        head = (ChatMessage(Role.SYSTEM, RULES, cache_points=(CachePoint(len(RULES)),)),)
        assert corpus.adopt_prefix(head).result() == len(TEXTS)
        clock.now = 1e12
        assert collect_garbage(corpus._catalog, corpus.engine.store, clock=clock).num_entries == 0
        metrics = corpus.generate(kept_conversation(), SHORT).metrics
        assert [(use.label, use.is_hit) for use in metrics.modules] == [("(prefix)", True)]
        assert notes(corpus._catalog) == {}


def test_short_entries_become_a_part_of_the_next(engine, catalog):
    """Fewer than 16 tokens between two points are not worth an entry; behind the last, none is."""
    kept = KeptEntries(engine, catalog)
    ends = [5, 30, 40, 60, 70]
    chain = kept.chain(HEAD, [TokenPoint(end, 300.0) for end in ends], ())
    assert [link.end for link in chain] == [30, 60]
    assert kept.chain(tuple(range(50, 70)), [TokenPoint(15, 300.0)], ()) == ()


def test_first_points_and_the_last_count_when_there_are_many(engine, catalog):
    """The first entries stay the same while a conversation grows; the last point is always kept."""
    head = tuple(i % 250 for i in range(400))
    ends = list(range(20, 400, 20))
    chain = KeptEntries(engine, catalog).chain(head, [TokenPoint(e, 300.0) for e in ends], ())
    assert [link.end for link in chain] == [20, 40, 60, 380]
    assert len(chain) == MAX_POINTS


def test_chain_goes_on_behind_entries_of_a_former_process(engine, tmp_path):
    """Notes are read when a corpus is opened; those of another kind of entries do not count."""
    with Catalog(tmp_path, tokenizer_id="t") as catalog:
        KeptEntries(engine, catalog).chain(HEAD, [TokenPoint(40, 300.0)], ())
    with Catalog(tmp_path, tokenizer_id="t") as catalog:
        chain = KeptEntries(engine, catalog).chain(HEAD, [TokenPoint(90, 300.0)], ())
        assert [link.end for link in chain] == [40, 90]
        other = (7, *HEAD[1:])
        chain = KeptEntries(engine, catalog).chain(other, [TokenPoint(90, 300.0)], ())
        assert [link.end for link in chain] == [90]
        with tiny_engine(tenant="b") as stranger:
            chain = KeptEntries(stranger, catalog).chain(HEAD, [TokenPoint(95, 300.0)], ())
            assert [link.end for link in chain] == [95]


def test_chain_begins_anew_when_earlier_entries_expired(engine, catalog, clock):
    """What may be gone at any moment decides nothing any more."""
    kept = KeptEntries(engine, catalog, clock=clock)
    kept.chain(HEAD, [TokenPoint(40, 300.0)], ())
    clock.now = 1300.0
    chain = kept.chain(HEAD, [TokenPoint(90, 300.0)], ())
    assert [link.end for link in chain] == [90]


def test_kept_entries_are_evicted_when_the_store_is_full(tmp_path):
    """They are never pinned: the prompt is answered from what is computed again."""
    with opened(memory_bytes=100_000) as corpus:
        first = corpus.generate(kept_conversation(), SHORT)
        corpus.add(TEXTS, pinned=False)
        again = corpus.generate(kept_conversation(), SHORT)
        assert corpus.engine.store.stats()[-1].num_evictions > 0
    assert first.token_ids == again.token_ids
    assert again.metrics.num_cache_creation_tokens == first.metrics.num_cache_creation_tokens
