"""Commands that look after a store load no model."""

from __future__ import annotations

import pytest

from pc_rag.cli import opening
from pc_rag.corpus import Corpus
from pc_rag.engine import PromptCache
from pc_rag.model.conversation import CachePoint, ChatMessage
from pc_rag.model.loading import load_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import Role
from tests.support.cli import NUM_CHUNKS, run


@pytest.fixture(autouse=True)
def no_model(indexed, monkeypatch):
    """Loading a model fails from here on."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(opening, "load_model", refuse)


def entry_files(indexed):
    return sorted((indexed.store / "kv" / "entries").rglob("*.safetensors"))


def test_numbers_are_those_of_the_store_when_stats_are_asked_for(indexed):
    """Documents, chunks, tokens and bytes; theory is 2 · layers · kv_heads · head_dim · bytes."""
    found = indexed.run("stats", "--json").json
    assert found["catalog"]["num_documents"] == 3
    assert found["catalog"]["num_chunks"] == NUM_CHUNKS
    (entries,) = found["entries"]
    assert entries["theory_bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert entries["num_entries"] == NUM_CHUNKS + 1  # and the prefix
    assert entries["file_bytes"] == sum(path.stat().st_size for path in entry_files(indexed))
    assert entries["bytes_per_token"] == entries["file_bytes"] / entries["num_tokens"]
    assert entries["num_tokens"] > found["catalog"]["num_tokens"] > 0
    assert found["tiers"][0]["resident_bytes"] == entries["file_bytes"]
    assert entries["num_texts"] == entries["num_starts"] == NUM_CHUNKS + 1
    assert (entries["most_starts"], entries["mean_starts"]) == (1, 1.0)


def test_numbers_are_readable_when_stats_are_for_people(indexed):
    """The table shows documents, the tier, and bytes per token beside theory."""
    done = indexed.run("stats")
    assert done.exit_code == 0
    for part in ("documents", "tier disk", "7 entries", "bytes/token", "768", "tiny", "1 starts"):
        assert part in done.stdout


def test_damaged_file_is_counted_when_stats_meet_it(indexed):
    """A cut file does not stop the statistics."""
    entry_files(indexed)[0].write_bytes(b"cut")
    found = indexed.run("stats", "--json").json
    assert found["num_unreadable"] == 1
    assert found["entries"][0]["num_entries"] == NUM_CHUNKS


def test_bytes_are_reclaimed_when_a_document_is_removed(indexed):
    """Removing leaves a tombstone; gc deletes its chunks and entries."""
    num_files = len(entry_files(indexed))
    name = str(indexed.documents / "cats.md")
    done = indexed.run("remove", name, "--json")
    assert done.json == {"removed": [name]}
    catalog = indexed.run("stats", "--json").json["catalog"]
    assert (catalog["num_documents"], catalog["num_tombstones"]) == (2, 1)
    report = indexed.run("gc", "--json").json
    assert report["num_documents"] == 1
    assert report["num_entries"] == report["num_chunks"] > 0
    assert len(entry_files(indexed)) == num_files - report["num_entries"]


def test_kept_entries_are_reclaimed_when_they_expired(indexed):
    """What prompts asked to be kept: an hour is not over, a moment is."""
    num_files = len(entry_files(indexed))
    with (
        PromptCache.from_pretrained(
            load_model(indexed.model), store=indexed.store / "kv"
        ) as engine,
        Corpus(engine, indexed.store, has_retrieval=False) as corpus,
    ):
        for text, ttl in (("Answer in one short sentence.", 3600.0), ("Be kind and brief.", 1e-6)):
            kept = ChatMessage(Role.SYSTEM, text, cache_points=(CachePoint(len(text), ttl),))
            asked = ChatMessage(Role.USER, "Who?")
            corpus.generate((kept, asked), GenerationConfig(max_new_tokens=1))
    assert len(entry_files(indexed)) == num_files + 2
    report = indexed.run("gc", "--json").json
    assert report["num_entries"] == 1
    assert report["num_bytes"] > 0
    assert len(entry_files(indexed)) == num_files + 1
    assert indexed.run("gc", "--json").json["num_entries"] == 0


def test_nothing_is_removed_when_one_id_is_unknown(indexed):
    """All or nothing, with exit code 1."""
    done = indexed.run("remove", indexed.documents / "cats.md", "absent")
    assert done.exit_code == 1
    assert "'absent'" in done.stderr
    assert indexed.run("stats", "--json").json["catalog"]["num_documents"] == 3


def test_damage_is_found_when_checked(indexed):
    """Exit code 3, the key is named, and a second check is clean."""
    damaged = entry_files(indexed)[0]
    data = bytearray(damaged.read_bytes())
    data[-20] ^= 1
    damaged.write_bytes(data)
    done = indexed.run("check", "--json")
    assert done.exit_code == 3
    assert done.json == {"num_checked": NUM_CHUNKS + 1, "damaged": [damaged.name.partition(".")[0]]}
    assert indexed.run("check").stdout == "6 entries read, 0 damaged\n"


def test_results_are_readable_when_gc_and_remove_are_for_people(indexed):
    """Each says what it did on stdout."""
    name = str(indexed.documents / "cats.md")
    assert indexed.run("remove", name).stdout == f"removed {name}\n"
    assert "tombstones  1" in indexed.run("gc").stdout


@pytest.mark.parametrize("command", [("stats",), ("gc",), ("check",), ("remove", "x")])
def test_store_failure_is_reported_when_there_is_no_store(tmp_path, command):
    """Exit code 3, and nothing is made."""
    done = run(*command, "--store", tmp_path / "absent")
    assert done.exit_code == 3
    assert "no store here" in done.stderr
    assert not (tmp_path / "absent").exists()
