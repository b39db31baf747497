"""The nearest vectors are found by name, the same ones every time."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.corpus.retrieval import ScoredId, VectorIndex
from pc_rag.errors import ConfigError

X, Y = np.eye(2, dtype=np.float32)


def index_of(vectors):
    index = VectorIndex(2)
    index.add(list(vectors), np.array(list(vectors.values()), dtype=np.float32))
    return index


def names(found):
    return [scored.id for scored in found]


vectors_by_name = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.tuples(st.integers(-3, 3), st.integers(-3, 3)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(vectors_by_name, st.integers(0, 12), st.data())
def test_results_equal_a_sorted_list_when_scores_tie(vectors, k, data):
    """By falling score, then by name; also among allowed names and after removals."""
    index = index_of(vectors)
    removed = data.draw(st.sets(st.sampled_from(sorted(vectors))))
    assert index.remove([*removed, "unknown"]) == len(removed)
    allowed = data.draw(st.none() | st.sets(st.sampled_from([*sorted(vectors), "unknown"])))
    expected = sorted(
        (-float(x), name)
        for name, (x, _) in vectors.items()
        if name not in removed and (allowed is None or name in allowed)
    )[:k]
    assert index.search(X, k, allowed=allowed) == [
        ScoredId(name, -score) for score, name in expected
    ]


def test_vector_is_replaced_when_its_name_is_added_again():
    """A name has one vector; of a name given twice the last row counts."""
    index = index_of({"a": X, "b": X})
    index.add(["a"], Y[None])
    index.add(["b", "b"], np.stack([X, 3 * X]))
    assert index.search(X, 2) == [ScoredId("b", 3.0), ScoredId("a", 0.0)]
    assert len(index) == 2
    assert "a" in index


def test_order_is_the_same_when_vectors_come_in_another_order():
    """Ties are cut by name, not by the order of additions."""
    listed = {f"{n:02}": X for n in range(40)}
    backwards = dict(reversed(listed.items()))
    assert names(index_of(listed).search(X, 3)) == names(index_of(backwards).search(X, 3))
    assert names(index_of(listed).search(X, 3)) == ["00", "01", "02"]


def test_nothing_is_found_when_the_index_is_empty_or_nothing_is_allowed():
    """No placeholder ids."""
    assert VectorIndex(2).search(X, 3) == []
    assert index_of({"a": X}).search(X, 3, allowed=()) == []
    assert index_of({"a": X}).search(X, 0) == []


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.zeros((1, 3)), r"shape \(1, 3\); expected \(1, 2\)"),
        (np.zeros((2, 2)), r"shape \(2, 2\)"),
        (np.full((1, 2), np.nan), "not finite"),
    ],
)
def test_vectors_are_refused_when_they_do_not_fit(vectors, message):
    """Another embedder's vectors are named by their shape, and nothing is added."""
    index = index_of({"a": X})
    with pytest.raises(ConfigError, match=message):
        index.add(["b"], vectors)
    with pytest.raises(ConfigError, match=r"\(1, 3\)"):
        index.search(np.zeros(3, dtype=np.float32), 1)
    assert names(index.search(X, 5)) == ["a"]


def test_results_are_whole_when_threads_add_and_search():
    """Searches beside additions and removals always find the best and never an unknown id."""
    index = index_of({"best": 9 * X})
    firsts = []

    def change(offset):
        for n in range(100):
            index.add([f"{offset}-{n}"], X[None])
            index.remove([f"{offset}-{n - 5}"])

    def search():
        firsts.extend(names(index.search(X, 3))[0] for _ in range(100))

    threads = [threading.Thread(target=change, args=(n,)) for n in range(2)]
    threads += [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert firsts == ["best"] * 200
    assert len(index) == 11
