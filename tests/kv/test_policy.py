from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from pc_rag.kv import LruPolicy, MemoryTier
from pc_rag.kv.locks import KeyedLocks
from pc_rag.types import ModuleKey
from tests.support.kv import CPU, numbered_entry


@given(
    st.lists(
        st.tuples(st.sampled_from(["added", "used", "removed"]), st.sampled_from("abcde")),
        max_size=40,
    )
)
def test_lru_orders_by_last_use_when_told_anything(events: list[tuple[str, str]]) -> None:
    """Against a plain list: what was added or used last goes last; unknown keys are ignored."""
    policy = LruPolicy()
    expected: list[str] = []
    for event, letter in events:
        key = ModuleKey(letter)
        if event == "added":
            policy.added(key, 1)
        elif event == "used":
            policy.used(key)
        else:
            policy.removed(key)
        known = letter in expected
        if known:
            expected.remove(letter)
        if event == "added" or (event == "used" and known):
            expected.append(letter)
        assert list(policy.candidates()) == expected


def test_tier_evicts_in_the_policys_order_when_given_another() -> None:
    """A policy decides by keys and sizes only, and a tier follows it."""

    class LargestFirst(LruPolicy):
        def candidates(self):  # type: ignore[no-untyped-def]
            return iter(sorted(self._num_bytes, key=self._num_bytes.__getitem__, reverse=True))

    small, large = numbered_entry(1, num_tokens=2), numbered_entry(2, num_tokens=5)
    tier = MemoryTier(small.num_bytes + large.num_bytes, LargestFirst())
    tier.put(large)
    tier.put(small)
    tier.lease(large.address, CPU).release()
    tier.put(numbered_entry(3, num_tokens=2))
    assert tier.lookup(small.address).is_hit
    assert not tier.lookup(large.address).is_hit


def test_keyed_locks_exclude_one_key_only_when_held() -> None:
    """The holder of one key keeps out others of that key, and nobody else; nothing stays behind."""
    locks = KeyedLocks()
    entered: list[str] = []

    def enter(key: str) -> None:
        with locks.hold(ModuleKey(key)):
            entered.append(key)

    with locks.hold(ModuleKey("a")):
        same = threading.Thread(target=enter, args=("a",))
        other = threading.Thread(target=enter, args=("b",))
        same.start()
        other.start()
        other.join(10)
        assert entered == ["b"]
    same.join(10)
    assert entered == ["b", "a"]
    assert locks._by_key == {}
