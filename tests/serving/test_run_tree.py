"""A callback finds the outermost run it belongs to, and memory stays bounded."""

from __future__ import annotations

import uuid

import pytest

from pc_rag.serving.runs import RunTree


def test_open_runs_are_forgotten_when_their_ends_never_come():
    """A run that vanished does not stay for ever, nor do the runs inside it."""
    tree = RunTree(str, max_finished=2, max_open=2)
    ids = [uuid.uuid4() for _ in range(6)]
    for parent, child in ((0, 1), (2, 3), (4, 5)):
        tree.start(ids[parent], None)
        tree.start(ids[child], ids[parent])
    assert tree.num_open_runs == 4
    assert tree.of(ids[1]) is None
    assert tree.of(ids[3]) == str(ids[2])
    tree.end(ids[2])
    assert tree.of(ids[3]) == str(ids[2])
    tree.end(ids[4])
    for _ in range(2):
        late = uuid.uuid4()
        tree.start(late, None)
        tree.end(late)
        tree.end(late)
    assert tree.num_open_runs == 0
    assert len(tree.finished()) == 2


@pytest.mark.parametrize("is_patient", [False, True])
def test_root_is_finished_by_its_last_call_when_it_is_patient(is_patient):
    """A query that returns a stream ends before its call; a patient root waits for the call."""
    tree = RunTree(str, max_finished=2, is_patient=is_patient)
    tree.start("query", None)
    tree.start("call", "query")
    assert tree.end("query") == (None if is_patient else "query")
    assert tree.finished() == ([] if is_patient else ["query"])
    assert tree.of("call") == "query"
    assert tree.end("call") == ("query" if is_patient else None)
    assert tree.end("call") is None
    assert tree.finished() == ["query"]
    assert tree.num_open_runs == 0


def test_root_is_open_when_only_a_run_inside_a_patient_one_ended():
    """A retriever's end does not finish its query."""
    tree = RunTree(str, max_finished=2, is_patient=True)
    tree.start("query", None)
    tree.start("retriever", "query")
    assert tree.end("retriever") is None
    assert tree.finished() == []
    assert tree.end("query") == "query"


def test_root_leaves_no_trace_when_it_is_not_worth_keeping():
    """A root that nobody asks for takes no place of one that somebody does, nor do its runs."""
    tree = RunTree(str, max_finished=1, is_kept=lambda state: state == "query")
    for root in ("query", "embedding"):
        tree.start(root, None)
        tree.start((root, "inside"), root)
        tree.end(root)
    assert tree.finished() == ["query"]
    assert tree.of(("embedding", "inside")) is None
    assert tree.of(("query", "inside")) == "query"


def test_outermost_marked_run_is_found_when_marked_runs_nest():
    """A run knows the outermost run of a kind around it, and not itself as one."""
    tree = RunTree(str, max_finished=2)
    tree.start("query", None)
    tree.start("outer", "query", mark="retriever")
    tree.start("between", "outer")
    tree.start("inner", "between")
    tree.mark("inner", "retriever")
    tree.start("leaf", "inner")
    assert [tree.around(each, "retriever") for each in ("query", "outer")] == [None, None]
    assert [tree.around(each, "retriever") for each in ("between", "inner", "leaf")] == (
        ["outer"] * 3
    )
    assert tree.around("leaf", "call") is None
    assert tree.around("unknown", "retriever") is None
