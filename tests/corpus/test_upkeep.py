"""A corpus keeps in step with whoever owns its documents."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import pytest

from pc_rag.corpus import (
    Catalog,
    Corpus,
    Document,
    IngestReport,
    PromptFormat,
    chunk_id_of,
    publishing,
)
from pc_rag.corpus.catalog.catalog import FILE_NAME
from pc_rag.errors import IngestError, StoreIOError
from pc_rag.kv.memory_tier import MemoryTier
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    chunk_uses,
    loaded_model,
    opened,
    tiny_engine,
)

OURS = {"owner": "us"}


def given(*texts, **fields):
    """A document that was split elsewhere."""
    return Document.of_chunks(texts, **{"id": "d"} | fields)


@pytest.fixture
def corpus():
    with opened(has_retrieval=False) as corpus:
        yield corpus


def entries_of(corpus, *texts):
    return [part.key for part in corpus.plan(" | ".join(texts)).plan.cached]


def ids(corpus):
    return [record.id for record in corpus.documents()]


def test_unknown_chunks_come_behind_known_ones_when_they_are_ensured(corpus):
    """Nothing is dropped, and source and metadata stay; a whole document has its own order."""
    corpus.add([given(CAT, DOG, source="s", metadata={"k": "v"})])
    report = corpus.upkeep.ensure([given(FISH, DOG), given("ok", id="new")])
    assert (report.num_encoded, report.num_updated, report.num_added) == (2, 1, 1)
    assert corpus.upkeep.chunk_texts("d") == (CAT, DOG, FISH)
    assert corpus.upkeep.chunk_texts("new") == ("ok",)
    assert corpus.documents(id_beginning="d")[0].metadata == {"k": "v"}
    corpus.upkeep.ensure([given(FISH, DOG, CAT)])
    assert corpus.upkeep.chunk_texts("d") == (FISH, DOG, CAT)
    again = corpus.upkeep.ensure([given(DOG)])
    assert (again.num_encoded, again.num_unchanged) == (0, 1)


def test_repeated_chunks_stay_when_the_others_are_ensured(corpus):
    """A document may hold a text twice; given once, it is not whole."""
    corpus.add([given(CAT, DOG, CAT)])
    assert corpus.upkeep.ensure([given(CAT, DOG)]).num_unchanged == 1
    assert corpus.upkeep.chunk_texts("d") == (CAT, DOG, CAT)


def test_newer_version_stays_when_it_comes_while_others_are_ensured(corpus, monkeypatch):
    """What came during a long work is looked at again, and not undone."""
    monkeypatch.setattr(publishing, "_WINDOW_TOKENS", 1)
    corpus.add([given(DOG, id="e")])
    corpus.upkeep.ensure(
        [given(CAT), given(DOG, id="e")],
        on_progress=lambda _: corpus.add([given(FISH, id="e")]),
    )
    assert corpus.upkeep.chunk_texts("e") == (FISH, DOG)


def test_missing_entries_are_encoded_when_they_are_ensured(corpus):
    """Those that left the store, behind every prefix; none where all are there."""
    corpus.add([given(CAT, DOG)])
    for key in entries_of(corpus, CAT, DOG):
        corpus.engine.store.remove(key)
    assert corpus.upkeep.ensure([given(DOG)]).num_encoded == 2
    assert corpus.upkeep.ensure([given(CAT, DOG)]).num_encoded == 0
    uses = chunk_uses(corpus.generate(f"{CAT} {DOG}", SHORT))
    assert [use.is_hit for use in uses] == [True, True]


def test_document_is_refused_when_it_is_ensured_without_chunks(corpus):
    """Which part of it is missing could not be said."""
    with pytest.raises(IngestError, match="of_chunks"):
        corpus.upkeep.ensure([Document(CAT, id="d")])


def test_entries_are_stored_again_when_the_folder_was_deleted_under_the_corpus(tmp_path):
    """Pitfall 42: memory holds them still, and a restart would find nothing."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add([given(CAT, DOG)])
        shutil.rmtree(tmp_path / "kv")
        assert corpus.add([given(CAT, DOG)]).num_encoded == 2
    with opened(tmp_path, has_retrieval=False) as corpus:
        assert corpus.add([given(CAT, DOG)]).num_encoded == 0
        assert all(use.is_hit for use in chunk_uses(corpus.generate(f"{CAT} {DOG}", SHORT)))


def test_catalog_is_not_written_when_nothing_changed(tmp_path):
    """Thousands of unchanged documents cost no write that has to reach the disk."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add([given(CAT, DOG)])
        with closing(sqlite3.connect(tmp_path / "catalog" / FILE_NAME)) as other:

            def version():
                return other.execute("PRAGMA data_version").fetchone()

            before = version()
            corpus.add([given(CAT, DOG)])
            corpus.upkeep.ensure([given(DOG)])
            assert version() == before
            corpus.add([given(CAT)])
            assert version() != before


def test_revision_changes_when_documents_do(corpus):
    """At every change, also one that takes another back; not for what was there."""
    found = [corpus.upkeep.revision]
    for change in (
        lambda: corpus.add([given(CAT)]),
        lambda: corpus.add([given(CAT, DOG)]),
        lambda: corpus.add([given(CAT)]),
        lambda: corpus.remove("d"),
        lambda: corpus.add([given(CAT)]),
    ):
        change()
        found.append(corpus.upkeep.revision)
    assert len(set(found)) == len(found)
    corpus.add([given(CAT)])
    corpus.generate(CAT, SHORT)
    assert corpus.upkeep.revision == found[-1]


def test_revision_changes_when_folders_or_the_model_are_others(tmp_path):
    """Pitfall 42: the store or the catalog deleted, other weights, another prompt format."""

    def revision(**options):
        with opened(tmp_path, has_retrieval=False, **options) as corpus:
            return corpus.upkeep.revision

    first = revision()
    assert revision() == first
    others = [
        revision(loaded=loaded_model(seed=1)),
        revision(prompt_format=PromptFormat(prefix="Read.")),
    ]
    shutil.rmtree(tmp_path / "kv")
    others.append(revision())
    assert revision() == others[-1]
    shutil.rmtree(tmp_path / "catalog")
    others.append(revision())
    assert len({first, *others}) == 5


def test_catalog_has_one_id_when_it_is_opened_twice(tmp_path):
    """Two of one folder agree, another folder's differs."""
    with Catalog(tmp_path / "a", tokenizer_id="t") as one, Catalog(
        tmp_path / "a", tokenizer_id="u"
    ) as two, Catalog(tmp_path / "b", tokenizer_id="t") as other:  # fmt: skip
        assert one.id() == two.id() != other.id()


def test_revision_is_the_same_when_two_corpora_share_folder_and_store(tmp_path):
    """Whoever remembers it may ask another process."""
    store = MemoryTier(1 << 30)
    with tiny_engine(store) as engine:
        one = Corpus(engine, tmp_path, has_retrieval=False)
        two = Corpus(engine, tmp_path, has_retrieval=False)
        one.add([given(CAT)])
        assert one.upkeep.revision == two.upkeep.revision
        one.close()
        two.close()


def test_documents_are_found_by_their_owner_when_others_have_some(corpus):
    """By all of the metadata; without any, all of them."""
    corpus.add([given(CAT, metadata=OURS | {"page": "1"}), given(DOG, id="e")])
    assert [record.id for record in corpus.upkeep.documents(OURS)] == ["d"]
    assert [record.id for record in corpus.upkeep.documents()] == ["d", "e"]


def test_entries_are_restored_when_the_store_was_deleted(tmp_path):
    """Pitfall 42: those of the owner, once; another model looks for its own."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add([given(CAT, DOG, metadata=OURS), given(FISH, id="e")])
        assert corpus.upkeep.restore(OURS).num_encoded == 0
        shutil.rmtree(tmp_path / "kv")
        assert corpus.upkeep.restore(OURS).num_encoded == 2
        assert corpus.upkeep.restore(OURS) == IngestReport()
    with opened(tmp_path, has_retrieval=False) as corpus:
        assert corpus.upkeep.restore(OURS) == IngestReport()
        assert corpus.upkeep.restore().num_encoded == 1
    with opened(tmp_path, has_retrieval=False, loaded=loaded_model(seed=1)) as corpus:
        assert corpus.upkeep.restore(OURS).num_encoded == 2


def test_restoring_goes_on_when_it_failed(tmp_path, monkeypatch):
    """What was not done is not noted as done."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add([given(CAT)])
        corpus.upkeep.restore()
        shutil.rmtree(tmp_path / "kv")

        def fail(*arguments, **keywords):
            raise StoreIOError("the medium is gone")

        with monkeypatch.context() as patch:
            patch.setattr(corpus.engine.source, "encode", fail)
            with pytest.raises(StoreIOError):
                corpus.upkeep.restore()
        assert corpus.upkeep.restore().num_encoded == 1


def test_evicted_entries_are_left_when_the_store_is_the_same(corpus):
    """A store that cannot hold all would have them encoded over and over."""
    corpus.add([given(CAT)])
    corpus.upkeep.restore()
    for key in entries_of(corpus, CAT):
        corpus.engine.store.remove(key)
    assert corpus.upkeep.restore() == IngestReport()


def test_corpus_holds_what_its_owner_has_when_it_is_reconciled(corpus):
    """Removed, replaced, added, kept and missing; others' documents stay."""
    corpus.add([given(CAT, id=id_, metadata=OURS) for id_ in ("a", "b", "c")])
    corpus.add([given(DOG, id="theirs")])
    wanted = {
        "b": given(FISH, id="b", metadata=OURS),
        "c": None,
        "gone": None,
        "new": given(DOG, id="new", metadata=OURS),
    }
    report = corpus.upkeep.reconcile(wanted, where=OURS)
    assert (report.removed, report.missing, report.num_kept) == (("a",), ("gone",), 3)
    ingest = report.ingest
    assert (ingest.num_encoded, ingest.num_updated, ingest.num_added) == (1, 1, 1)
    assert ids(corpus) == ["b", "c", "new", "theirs"]
    assert corpus.upkeep.chunk_texts("b") == (FISH,)


def test_nothing_is_removed_when_the_owner_has_nothing_and_does_not_say_so(corpus):
    """It may be the wrong owner."""
    corpus.add([given(CAT, metadata=OURS)])
    with pytest.raises(IngestError, match=r"has 1.*drops_all=True"):
        corpus.upkeep.reconcile({}, where=OURS)
    assert corpus.upkeep.reconcile({}, where={"owner": "nobody"}).removed == ()
    assert corpus.upkeep.reconcile({}, where=OURS, drops_all=True).removed == ("d",)
    assert ids(corpus) == []


def test_reports_add_up_when_ingests_follow_each_other():
    """Every number of one is added to that of the other."""
    total = IngestReport(num_added=1, num_encoded=2, seconds=0.5) + IngestReport(num_encoded=3)
    assert total == IngestReport(num_added=1, num_encoded=5, seconds=0.5)


@pytest.mark.parametrize(
    "encode",
    [
        lambda upkeep: upkeep.restore(),
        lambda upkeep: upkeep.reconcile({"split": None, "whole": None}).ingest,
        lambda upkeep: upkeep.ensure(
            Document.of_chunks(upkeep.chunk_texts(id_), id=id_) for id_ in ("split", "whole")
        ),
    ],
    ids=["restore", "reconcile", "ensure"],
)
def test_documents_stay_as_they_are_when_only_entries_are_missing(encode):
    """However they were split: adding them again finds them unchanged."""
    documents = [
        Document("\n\n".join([CAT * 3, DOG * 3]), id="split"),
        Document(f"{FISH}\n\n{CAT}", id="whole", is_whole=True),
    ]
    with opened(has_retrieval=False) as corpus:
        corpus.add(documents)
        records, revision = corpus.documents(), corpus.upkeep.revision
        texts = [text for each in records for text in corpus.upkeep.chunk_texts(each.id)]
        keys = entries_of(corpus, *texts)
        assert len(keys) == 3
        for key in keys:
            corpus.engine.store.remove(key)
        report = encode(corpus.upkeep)
        assert (report.num_encoded, report.num_updated) == (3, 0)
        assert (corpus.documents(), corpus.upkeep.revision) == (records, revision)
        assert corpus.add(documents).num_unchanged == 2


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        (lambda corpus: corpus.add([given(DOG)]), (DOG, FISH)),
        (lambda corpus: corpus.remove("d"), (FISH,)),
    ],
    ids=["replaced", "removed"],
)
def test_change_is_kept_when_it_comes_while_a_document_is_ensured(corpus, meanwhile, expected):
    """Neither the former version comes back, nor is the new one lost."""
    corpus.add([given(CAT)])
    encode, changes = corpus.engine.source.encode, [meanwhile]

    def encode_late(*arguments, **keywords):
        if changes:
            changes.pop()(corpus)
        return encode(*arguments, **keywords)

    corpus.engine.source.encode = encode_late
    corpus.upkeep.ensure([given(FISH)])
    assert corpus.upkeep.chunk_texts("d") == expected
    corpus.gc()
    num_chunks = corpus.stats().catalog.num_chunks
    assert num_chunks == len(expected)
    assert corpus.engine.store.stats()[-1].num_entries == num_chunks + 1


def test_document_is_given_up_when_others_change_it_over_and_over(corpus):
    """It is said, and nothing of it is lost."""
    encode, numbers = corpus.engine.source.encode, iter(range(100))

    def encode_late(keys, *arguments, **keywords):
        with corpus._catalog._database.write() as connection:
            connection.execute("UPDATE documents SET added_at = ?", (next(numbers),))
        return encode(keys, *arguments, **keywords)

    corpus.add([given(CAT)])
    corpus.engine.source.encode = encode_late
    with pytest.raises(IngestError, match=r"'d'.*8 times"):
        corpus.upkeep.ensure([given(FISH)])
    assert corpus.upkeep.chunk_texts("d") == (CAT,)


def test_restored_entries_are_noted_when_another_model_encodes_them(tmp_path):
    """What is restored is known to ``gc``, beside what the first model stored."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add([given(CAT)])
        keys = entries_of(corpus, CAT)
    with opened(tmp_path, has_retrieval=False, loaded=loaded_model(seed=1)) as corpus:
        assert corpus.upkeep.restore().num_encoded == 1
        records = corpus._catalog.entries.of_chunk(chunk_id_of(CAT))  # a plan would note them, too
        noted = {record.key for record in records}
        assert set(keys) < noted


def test_nothing_is_looked_for_again_when_metadata_is_named_in_another_order(corpus):
    """It says which documents are meant, in whatever order."""
    corpus.add([given(CAT, metadata=OURS | {"page": "1"})])
    assert corpus.upkeep.restore(OURS | {"page": "1"}) != IngestReport()
    assert corpus.upkeep.restore({"page": "1"} | OURS) == IngestReport()


def test_callback_may_ensure_others_when_it_is_told_of_progress(corpus):
    """It does not wait for itself."""
    done = []

    def on_progress(_):
        if not done:
            done.append(corpus.upkeep.ensure([given(DOG, id="e")]).num_encoded)

    corpus.upkeep.ensure([given(CAT)], on_progress=on_progress)
    assert done == [1]
    assert ids(corpus) == ["d", "e"]
