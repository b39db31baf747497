"""What became of a document is said by the best use that any prompt of its run made of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pc_rag.serving.runs import CallOutcome, DocumentOutcome, FoundDocument, RunRecord
from pc_rag.serving.runs.record import documents_by_id
from pc_rag.types import HitKind, MissReason
from tests.support.uses import TEXTS, metrics_of, use_of

OSLO, LIMA, ROME = TEXTS


def _record(*found: FoundDocument) -> RunRecord:
    record = RunRecord("run")
    record.has_retriever = True
    record.retrieved.update(documents_by_id(found))
    return record


def _fates(record: RunRecord) -> list[DocumentOutcome]:
    return [each.outcome for each in record.freeze().documents]


@pytest.mark.parametrize("is_head", [True, False])
def test_document_is_partial_when_a_prompt_holds_a_part_of_it(is_head):
    """A chunk that the caller split is no hit and no miss, and says why (pitfall 38)."""
    head = replace(use_of(OSLO, hit_kind=HitKind.PARTIAL), miss_reason=MissReason.SPLIT)
    tail = use_of(OSLO, MissReason.SPLIT)
    record = _record(FoundDocument(OSLO, "Oslo"))
    record.add_call(CallOutcome.REPORTED, metrics_of(head if is_head else tail))
    report = record.freeze()
    assert [each.outcome for each in report.documents] == [DocumentOutcome.PARTIAL]
    assert [each.miss_reason for each in report.documents] == [MissReason.SPLIT]
    assert (report.num_documents_hit, report.num_documents_partial) == (0, 1)
    assert "Oslo: partial" in report.describe()
    assert report.to_dict()["num_documents_partial"] == 1
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        (use_of(OSLO), use_of(OSLO, hit_kind=HitKind.PARTIAL), DocumentOutcome.HIT),
        (
            use_of(OSLO, MissReason.IO),
            use_of(OSLO, hit_kind=HitKind.PARTIAL),
            DocumentOutcome.PARTIAL,
        ),
        (use_of(OSLO, MissReason.IO), use_of(OSLO), DocumentOutcome.HIT),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_best_use_stands_when_calls_differ(first, second, best, is_reversed):
    """A hit is better than a part, and a part than a miss, in whatever order they come."""
    record = _record(FoundDocument(OSLO, "Oslo"))
    for use in (second, first) if is_reversed else (first, second):
        record.add_call(CallOutcome.REPORTED, metrics_of(use))
    assert _fates(record) == [best]


def test_document_is_found_when_the_prompt_holds_another_form_of_it():
    """A node is known by its text with metadata, and by the text alone."""
    record = _record(
        FoundDocument(f"file: a.txt\n\n{OSLO}", "Oslo", (OSLO,)),
        FoundDocument(f"file: b.txt\n\n{LIMA}", "Lima", (LIMA,)),
        FoundDocument(f"file: c.txt\n\n{ROME}", "Rome", (ROME,)),
    )
    record.note_prompt(f"Answer from: {LIMA}")
    record.add_call(CallOutcome.REPORTED, metrics_of(use_of(OSLO)))
    assert _fates(record) == [
        DocumentOutcome.HIT,
        DocumentOutcome.NOT_INDEXED,
        DocumentOutcome.NOT_IN_PROMPT,
    ]


def test_document_is_unknown_when_no_call_that_held_it_told_anything():
    """A failed call, or another model's, does not make a chunk one that was never indexed."""
    record = _record(FoundDocument(OSLO, "Oslo"))
    record.add_call(CallOutcome.REPORTED, metrics_of(use_of(LIMA)))  # asked before it was found
    record.note_prompt(OSLO)
    record.add_call(CallOutcome.FAILED, None)
    assert _fates(record) == [DocumentOutcome.UNKNOWN]
    record.add_call(CallOutcome.REPORTED, metrics_of(use_of(LIMA)))
    assert _fates(record) == [DocumentOutcome.NOT_INDEXED]


def test_run_learns_late_metrics_when_its_call_was_counted_before():
    """Metrics without a call of their own explain documents, and count no call."""
    record = _record(FoundDocument(OSLO, "Oslo"))
    record.add_call(CallOutcome.CANCELLED, None)
    record.add_metrics(metrics_of(use_of(OSLO)))
    report = record.freeze()
    assert _fates(record) == [DocumentOutcome.HIT]
    assert sum(report.calls.values()) == 1
    assert report.num_prompt_tokens == 30
