from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.errors import ConfigError, StoreError
from pc_rag.kv import PrefixMatch, PrefixTree, Run, Symbol
from pc_rag.types import ModuleKey, Span

LARGE = 10**9
SPACE = "model"
CHUNK = ModuleKey("chunk a")
OTHER_CHUNK = ModuleKey("chunk b")
TOKEN_BYTES = 2 * 2 * 1 * 2 * 4  # keys and values, 2 layers, 1 head, 2 dimensions, float32

Prompt = tuple[tuple[Symbol, int], ...]


def prompt_of(*symbols: Symbol, start: int = 0) -> Prompt:
    """Symbols at consecutive positions; a chunk takes one, which no test minds."""
    return tuple((symbol, start + index) for index, symbol in enumerate(symbols))


def kv_of(prompt: Prompt, first: int, last: int, *, space: str = SPACE) -> torch.Tensor:
    """KV that all of the prompt up to each token decides, as a model's does: [2, 1, n, 2]."""
    numbers = [
        zlib.crc32(repr((space, prompt[: i + 1])).encode()) % 9973 for i in range(first, last)
    ]
    row = torch.tensor(numbers, dtype=torch.float32)
    return torch.stack([row, -row], dim=-1).expand(2, 1, last - first, 2)


def runs_of(prompt: Prompt, *, first: int = 0, space: str = SPACE) -> tuple[Run, ...]:
    """One run per stretch of tokens, over everything from ``first`` on."""
    runs: list[Run] = []
    start = first
    for index in range(first, len(prompt) + 1):
        ends = index == len(prompt) or isinstance(prompt[index][0], str)
        breaks = index > start and not ends and prompt[index][1] != prompt[index - 1][1] + 1
        if (ends or breaks) and index > start:
            kv = kv_of(prompt, start, index, space=space)
            runs.append(
                Run(keys=kv, values=2 * kv, start=prompt[start][1], symbols=Span(start, index))
            )
        if ends or breaks:
            start = index + 1 if ends else index
    return tuple(runs)


def insert(tree: PrefixTree, prompt: Prompt, *, space: str = SPACE) -> int:
    symbols, positions = [s for s, _ in prompt], [p for _, p in prompt]
    return tree.insert(
        symbols, positions=positions, runs=runs_of(prompt, space=space), namespace=space
    )


def match(tree: PrefixTree, prompt: Prompt, *, space: str = SPACE) -> PrefixMatch:
    symbols, positions = [s for s, _ in prompt], [p for _, p in prompt]
    return tree.match(symbols, positions=positions, namespace=space)


def assert_right(found: PrefixMatch, prompt: Prompt, *, space: str = SPACE) -> None:
    """The runs cover every matched token once, in order, with the KV of this very prefix."""
    covered: list[int] = []
    for run in found.runs:
        first, last = run.symbols.start, run.symbols.end
        expected = kv_of(prompt, first, last, space=space)
        assert torch.equal(run.keys, expected)
        assert torch.equal(run.values, 2 * expected)
        assert [p for _, p in prompt[first:last]] == list(range(run.start, run.span.end))
        covered += range(first, last)
    tokens = [i for i in range(found.num_symbols) if not isinstance(prompt[i][0], str)]
    assert covered == tokens
    assert found.num_tokens == len(tokens)


def test_whole_prompt_is_matched_when_seen_before() -> None:
    """A prompt inserted is found in full, its KV with it, whatever the prompt goes on with."""
    tree = PrefixTree(LARGE)
    prompt = prompt_of(1, 2, 3)
    assert insert(tree, prompt) == 3
    with match(tree, prompt_of(1, 2, 3, 4)) as found:
        assert found.num_symbols == 3
        assert_right(found, prompt)


def test_common_part_is_matched_when_prompts_part_in_a_run() -> None:
    """A system text is reused by another question, and by a shorter prompt."""
    tree = PrefixTree(LARGE)
    insert(tree, prompt_of(1, 2, 3, 4))
    assert insert(tree, prompt_of(1, 2, 9)) == 1
    for prompt, expected in (
        (prompt_of(1, 2, 3, 4), 4),
        (prompt_of(1, 2, 9), 3),
        (prompt_of(1, 2, 7), 2),
        (prompt_of(1), 1),
        (prompt_of(7), 0),
        ((), 0),
    ):
        with match(tree, prompt) as found:
            assert found.num_symbols == expected
            assert_right(found, prompt)
    assert tree.stats().resident_bytes == 5 * TOKEN_BYTES


def test_nothing_is_matched_when_positions_differ() -> None:
    """A token's KV holds at the position it was computed at, and nowhere else."""
    tree = PrefixTree(LARGE)
    insert(tree, prompt_of(1, 2, 3))
    with match(tree, prompt_of(1, 2, 3, start=1)) as found:
        assert found.num_symbols == 0
    gapped = ((1, 0), (2, 1), (3, 7))
    with match(tree, gapped) as found:
        assert found.num_symbols == 2
    assert insert(tree, gapped) == 1
    with match(tree, gapped) as found:
        assert found.num_symbols == 3
        assert_right(found, gapped)


def test_namespaces_do_not_meet_when_prompts_are_equal() -> None:
    """E6: another model's or tenant's KV is never served."""
    tree = PrefixTree(LARGE)
    insert(tree, prompt_of(1, 2))
    with match(tree, prompt_of(1, 2), space="another") as found:
        assert found.num_symbols == 0
    insert(tree, prompt_of(1, 2), space="another")
    with match(tree, prompt_of(1, 2), space="another") as found:
        assert_right(found, prompt_of(1, 2), space="another")


def test_tokens_behind_chunks_are_matched_when_the_chunks_agree() -> None:
    """A composed chunk is one symbol without KV; what follows it depends on it."""
    tree = PrefixTree(LARGE)
    prompt = prompt_of(1, 2, CHUNK, OTHER_CHUNK, 3, 4)
    assert insert(tree, prompt) == 6
    with match(tree, prompt) as found:
        assert found.num_symbols == 6
        assert [run.symbols for run in found.runs] == [Span(0, 2), Span(4, 6)]
        assert_right(found, prompt)
    for other, expected in (
        (prompt_of(1, 2, OTHER_CHUNK, CHUNK, 3, 4), 2),
        (prompt_of(1, 2, CHUNK, 3, 4), 3),
        (prompt_of(1, 2, CHUNK, OTHER_CHUNK, 9), 4),
    ):
        with match(tree, other) as found:
            assert found.num_symbols == expected
            assert_right(found, other)
    moved = (*prompt[:4], (3, 44), (4, 45))
    with match(tree, moved) as found:
        assert found.num_symbols == 4


def test_chunks_are_not_kept_when_no_token_follows_them() -> None:
    """Symbols without KV are worth nothing at the end of a path."""
    tree = PrefixTree(LARGE)
    assert insert(tree, prompt_of(1, CHUNK, OTHER_CHUNK)) == 1
    assert insert(tree, prompt_of(CHUNK)) == 0
    assert tree.stats().num_nodes == 1


def test_tree_copies_when_given_runs() -> None:
    """The caller's buffer may be reused at once; what was handed out is a view, not a copy."""
    tree = PrefixTree(LARGE)
    prompt = prompt_of(1, 2, 3)
    keys = kv_of(prompt, 0, 3).clone()
    run = Run(keys=keys, values=2 * keys, start=0, symbols=Span(0, 3))
    tree.insert([1, 2, 3], positions=[0, 1, 2], runs=[run], namespace=SPACE)
    keys.zero_()
    with match(tree, prompt) as found, match(tree, prompt) as again:
        assert_right(found, prompt)
        assert found.runs[0].keys.data_ptr() == again.runs[0].keys.data_ptr()
        assert found.runs[0].keys.is_contiguous()


def test_only_missing_tokens_need_runs_when_the_rest_is_there() -> None:
    """Runs may leave out what is in the tree, come in any order, overlap and be cut anywhere."""
    tree = PrefixTree(LARGE)
    prompt = prompt_of(1, 2, 3, 4, 5, 6)
    insert(tree, prompt[:2])

    def run(first: int, last: int) -> Run:
        kv = kv_of(prompt, first, last)
        return Run(keys=kv, values=2 * kv, start=first, symbols=Span(first, last))

    added = tree.insert(
        [1, 2, 3, 4, 5, 6],
        positions=range(6),
        runs=[run(4, 6), run(1, 3), run(2, 5)],
        namespace=SPACE,
    )
    assert added == 4
    with match(tree, prompt) as found:
        assert found.num_symbols == 6
        assert_right(found, prompt)


def test_malformed_input_is_refused_when_inserted() -> None:
    """What does not agree is an error that names it, and changes nothing."""
    tree = PrefixTree(LARGE)
    kv = torch.zeros(2, 1, 2, 2)
    good = Run(keys=kv, values=kv, start=0, symbols=Span(0, 2))

    def refused(message: str, symbols: list[Symbol], positions: list[int], *runs: Run) -> None:
        with pytest.raises(StoreError, match=message):
            tree.insert(symbols, positions=positions, runs=runs, namespace=SPACE)

    refused("3 symbols and 2 positions", [1, 2, 3], [0, 1], good)
    refused("no run covers", [1, 2, 3], [0, 1, 2], good)
    refused("no run covers", [1], [0])
    refused("elsewhere", [1, 2], [5, 6], good)
    refused("elsewhere", [1], [0], good)
    refused("covers a chunk", [1, CHUNK], [0, 1], good)
    wide = Run(keys=torch.zeros(2, 1, 1, 3), values=kv[:, :, :1], start=2, symbols=Span(2, 3))
    refused("may differ", [1, 2, 3], [0, 1, 2], good, wide)
    half = Run(keys=kv[:, :, :1], values=kv[:, :, :1].half(), start=2, symbols=Span(2, 3))
    refused("may differ", [1, 2, 3], [0, 1, 2], good, half)
    with pytest.raises(StoreError, match="have shape"):
        Run(keys=kv, values=kv[:, :, :1], start=0, symbols=Span(0, 2))
    with pytest.raises(StoreError, match="positions"):
        tree.match([1, 2], positions=[0], namespace=SPACE)
    with pytest.raises(ConfigError, match="capacity_bytes"):
        PrefixTree(-1)
    assert tree.stats().num_nodes == 0


def test_longest_unused_leaf_goes_when_room_is_needed() -> None:
    """Leaves go by age; what stands before a kept leaf stays."""
    tree = PrefixTree(5 * TOKEN_BYTES)
    insert(tree, prompt_of(1, 2, 3))
    insert(tree, prompt_of(1, 2, 4))
    match(tree, prompt_of(1, 2, 3)).release()
    insert(tree, prompt_of(7, 8))
    for prompt, expected in (
        (prompt_of(1, 2, 3), 3),
        (prompt_of(1, 2, 4), 2),
        (prompt_of(7, 8), 2),
    ):
        with match(tree, prompt) as found:
            assert found.num_symbols == expected
    assert tree.stats().resident_bytes == 5 * TOKEN_BYTES
    assert tree.stats().num_evictions == 1


def test_leased_path_stays_when_room_is_needed() -> None:
    """A leased match is not evicted; what cannot fit beside it is not kept, and evicts nothing."""
    tree = PrefixTree(4 * TOKEN_BYTES)
    insert(tree, prompt_of(1, 2))
    insert(tree, prompt_of(8))
    with match(tree, prompt_of(1, 2)) as found:
        assert insert(tree, prompt_of(5, 6, 7)) == 0
        with match(tree, prompt_of(8)) as other:
            assert other.num_symbols == 1
        assert insert(tree, prompt_of(5, 6)) == 2  # 8 goes, though 1 and 2 are unused for longer
        assert_right(found, prompt_of(1, 2))
        with match(tree, prompt_of(1, 2)) as again:
            assert again.num_symbols == 2
    assert insert(tree, prompt_of(5, 6, 7, 8)) == 2
    assert insert(tree, prompt_of(1, 2, 3, 4, 5)) == 0


def test_leading_pieces_are_kept_when_the_rest_does_not_fit() -> None:
    """A prompt's head is worth keeping without its tail; a chunk at the end of it is not."""
    tree = PrefixTree(3 * TOKEN_BYTES)
    assert insert(tree, prompt_of(1, 2, CHUNK, OTHER_CHUNK, 3, 4)) == 2
    assert tree.stats().num_nodes == 1
    with match(tree, prompt_of(1, 2, CHUNK)) as found:
        assert found.num_symbols == 2


def test_lent_bytes_count_until_released_when_a_leased_node_is_split() -> None:
    """A reader goes on reading the undivided tensors; they are counted as long as it does."""
    tree = PrefixTree(10 * TOKEN_BYTES)
    prompt = prompt_of(1, 2, 3, 4)
    insert(tree, prompt)
    with match(tree, prompt) as found:
        assert insert(tree, prompt_of(1, 2, 9)) == 1
        assert tree.stats().resident_bytes == (4 + 4 + 1) * TOKEN_BYTES
        assert_right(found, prompt)
    assert tree.stats().resident_bytes == 5 * TOKEN_BYTES
    tight = PrefixTree(7 * TOKEN_BYTES)
    insert(tight, prompt)
    with match(tight, prompt_of(1, 2)):
        assert insert(tight, prompt_of(1, 2, 9)) == 0
    assert insert(tight, prompt_of(1, 2, 9)) == 1


def test_empty_namespaces_are_forgotten_when_their_last_leaf_goes() -> None:
    """Many tenants in turn leave nothing behind but what fits."""
    tree = PrefixTree(2 * TOKEN_BYTES)
    for number in range(20):
        insert(tree, prompt_of(CHUNK, 1, 2), space=str(number))
    assert list(tree._roots) == ["19"]
    assert tree.stats().num_nodes == 2


def test_release_counts_once_when_called_twice() -> None:
    """A second release does not take another reader's claim away."""
    tree = PrefixTree(2 * TOKEN_BYTES)
    insert(tree, prompt_of(1, 2))
    first, second = match(tree, prompt_of(1, 2)), match(tree, prompt_of(1, 2))
    first.release()
    first.release()
    assert insert(tree, prompt_of(3)) == 0
    second.release()
    assert insert(tree, prompt_of(3)) == 1
    assert first.runs == ()


def test_stats_count_when_matching() -> None:
    """Hits are matches of a token; reused tokens are summed."""
    tree = PrefixTree(LARGE)
    insert(tree, prompt_of(1, 2, 3))
    for prompt in (prompt_of(1, 2), prompt_of(9), prompt_of(1, 2, 3)):
        match(tree, prompt).release()
    stats = tree.stats()
    assert (stats.num_matches, stats.num_hits, stats.num_reused_tokens) == (3, 2, 5)
    assert stats.capacity_bytes == LARGE


SYMBOLS = st.sampled_from([1, 2, 3, CHUNK, OTHER_CHUNK])
PROMPTS = st.lists(st.tuples(SYMBOLS, st.sampled_from([1, 1, 1, 4])), min_size=0, max_size=10).map(
    lambda steps: tuple(
        (symbol, sum(gap for _, gap in steps[: index + 1]))
        for index, (symbol, _) in enumerate(steps)
    )
)


def common(left: Prompt, right: Prompt) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def without_trailing_chunks(prompt: Prompt) -> Prompt:
    while prompt and isinstance(prompt[-1][0], str):
        prompt = prompt[:-1]
    return prompt


@settings(max_examples=150, deadline=None)
@given(inserted=st.lists(PROMPTS, max_size=8), asked=st.lists(PROMPTS, max_size=4))
def test_longest_common_prefix_is_matched_when_there_is_room(
    inserted: list[Prompt], asked: list[Prompt]
) -> None:
    """Against a list of sequences: the match is the longest prefix shared with any of them."""
    tree = PrefixTree(LARGE)
    known: list[Prompt] = []
    for prompt in inserted:
        kept = without_trailing_chunks(prompt)
        missing = len(kept) - max((common(kept, other) for other in known), default=0)
        assert insert(tree, prompt) == missing
        known.append(kept)
        prefixes = {other[: i + 1] for other in known for i in range(len(other))}
        num_tokens = sum(not isinstance(prefix[-1][0], str) for prefix in prefixes)
        assert tree.stats().resident_bytes == num_tokens * TOKEN_BYTES
    for prompt in [*asked, *inserted]:
        with match(tree, prompt) as found:
            expected = max((common(prompt, other) for other in known), default=0)
            assert found.num_symbols == expected
            assert_right(found, prompt)


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(0, 14),
    events=st.lists(
        st.tuples(st.sampled_from(["insert", "match", "lease", "release"]), PROMPTS), max_size=25
    ),
)
def test_cap_and_leases_hold_when_anything_happens(
    capacity: int, events: list[tuple[str, Prompt]]
) -> None:
    """E9 for the prefix cache: never over the cap, leased runs intact, never another's KV."""
    tree = PrefixTree(capacity * TOKEN_BYTES)
    held: list[tuple[PrefixMatch, Prompt]] = []
    for event, prompt in events:
        if event == "insert":
            added = insert(tree, prompt)
            assert 0 <= added <= len(prompt)
        elif event == "release" and held:
            held.pop(0)[0].release()
        else:
            found = match(tree, prompt)
            assert_right(found, prompt)
            if event == "lease":
                held.append((found, prompt))
            else:
                found.release()
        assert tree.stats().resident_bytes <= capacity * TOKEN_BYTES
        for found, matched in held:
            assert_right(found, matched)
            # Walked, not matched: a match would be a use, and keep what a lease has to keep.
            num_there = sum(met.num_matched for met in tree._walk(SPACE, matched))
            assert num_there >= found.num_symbols
    for found, _ in held:
        found.release()
    total = sum(node.num_bytes for node in tree._by_use)
    assert tree.stats().resident_bytes == total
    assert all(node.num_leases == 0 for node in tree._by_use)
    assert all(node.children or node.keys is not None for node in tree._by_use)
    assert all(root.children for root in tree._roots.values())


def test_matches_are_right_when_eight_threads_share_a_tree() -> None:
    """Inserting, matching and evicting at once never mixes prompts up."""
    tree = PrefixTree(30 * TOKEN_BYTES)

    def work(seed: int) -> None:
        for step in range(40):
            number = (seed * 5 + step) % 7
            prompt = prompt_of(1, 2, number, CHUNK, 3, number + 1)
            insert(tree, prompt)
            with match(tree, prompt) as found:
                assert_right(found, prompt)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result()
    assert tree.stats().resident_bytes <= 30 * TOKEN_BYTES
