"""The exact prefix cache: leading runs of prompts seen before, reused as they are.

A radix tree over steps, a step being a symbol and the position ID it was computed at. A node holds
tokens at consecutive position IDs with their KV, or one composed chunk, whose KV lies in the store:

    root ── [system text, 0-40) ─┬─ chunk a at 40 ── [question, 200-220)
                                 └─ chunk b at 40 ─┬─ [question, 180-190)
                                                   └─ chunk c at 180 ── [question, 300-330)

What follows a chunk was computed behind it, so the chunk is part of the path. Only leaves are
evicted: a node's KV is of no use without what stands before it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import torch

from pc_rag.errors import ConfigError, StoreError
from pc_rag.kv.prefix_match import PrefixMatch, PrefixStats, Run, Symbol
from pc_rag.kv.prefix_runs import check_covered, check_runs, copy_piece, piece_bytes
from pc_rag.types import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Step: TypeAlias = tuple[Symbol, int]
_Steps: TypeAlias = tuple[_Step, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """One node; the root of a namespace has no steps.

    Attributes:
        steps: Tokens at consecutive positions, or one chunk.
        parent: The node before; ``None`` for a root.
        keys: KV of the tokens, owned; ``None`` for a chunk.
        values: Likewise.
        children: The nodes behind, by their first step.
        num_leases: Matches that hand out the node's tensors, or tensors it had before a split.
        lent_bytes: Bytes of tensors that a split replaced while they were handed out.
        namespace: Of a root, what it is the root of.
    """

    steps: _Steps
    parent: _Node | None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    children: dict[_Step, _Node] = field(default_factory=dict)
    num_leases: int = 0
    lent_bytes: int = 0
    namespace: str = ""

    @property
    def num_bytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class _Found:
    """A node met on the way down, and how much of it was matched.

    Attributes:
        node: The node.
        first: Index of the prompt's symbol that its first step matched.
        num_matched: Leading steps of the node that matched.
    """

    node: _Node
    first: int
    num_matched: int


class PrefixTree:
    """A bounded exact prefix cache in memory; every method may be called from any thread.

    A namespace keeps apart what must not meet: the model's fingerprint, the tenant, and whatever
    else decides KV beside symbols and positions, such as the repair.

    Args:
        capacity_bytes: Limit on the bytes of keys and values, those still lent included. A split
            takes the bytes of its node once more for the moment of the copy.

    Raises:
        ConfigError: The capacity is negative.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ConfigError(
                f"prefix cache: capacity_bytes is {capacity_bytes}; it must be 0 or more"
            )
        self._capacity_bytes = capacity_bytes
        self._lock = Lock()
        self._roots: dict[str, _Node] = {}
        self._by_use: OrderedDict[_Node, None] = OrderedDict()  # the longest unused first
        self._resident_bytes = 0
        self._num_matches = 0
        self._num_hits = 0
        self._num_reused_tokens = 0
        self._num_evictions = 0

    def match(
        self, symbols: Sequence[Symbol], *, positions: Sequence[int], namespace: str
    ) -> PrefixMatch:
        """Find and lease the longest leading run that was inserted before.

        Args:
            symbols: The prompt. Leave out the last token where one must be computed.
            positions: The position ID of each symbol; of a chunk, its first.
            namespace: Where to look.

        Raises:
            StoreError: There is not one position per symbol.
        """
        steps = _pair(symbols, positions)
        with self._lock:
            found = self._walk(namespace, steps)
            for met in found:
                met.node.num_leases += 1
                self._by_use.move_to_end(met.node)
            runs = tuple(_run_of(met) for met in found if met.node.keys is not None)
            self._num_matches += 1
            self._num_hits += bool(runs)
            self._num_reused_tokens += sum(run.num_tokens for run in runs)
        nodes = tuple(met.node for met in found)
        return PrefixMatch(_end_of(found), runs=runs, on_release=lambda: self._release(nodes))

    def insert(
        self,
        symbols: Sequence[Symbol],
        *,
        positions: Sequence[int],
        runs: Sequence[Run],
        namespace: str,
    ) -> int:
        """Keep what is not there yet, as far as it fits.

        Args:
            symbols: The prompt.
            positions: The position ID of each symbol; of a chunk, its first.
            runs: KV that covers every token which is not yet in the tree, in any order. Copied.
            namespace: Where to keep it.

        Returns:
            How many symbols were added. Chunks that no token follows are not worth keeping.

        Raises:
            StoreError: There is not one position per symbol, or a run does not agree with them, or
                a token that is not in the tree is covered by no run. Nothing was changed.
        """
        steps = _pair(symbols, positions)
        while steps and isinstance(steps[-1][0], str):
            steps = steps[:-1]
        check_runs(runs, symbols=symbols, positions=positions)
        with self._lock:
            found = self._walk(namespace, steps)
            pieces = list(_cut(steps, _end_of(found)))
            check_covered([piece for piece in pieces if not _is_chunk(steps, piece)], runs)
            if not pieces:
                for met in found:
                    self._by_use.move_to_end(met.node)
                return 0
            node = self._attachment(namespace, found)
            return 0 if node is None else self._grow(node, steps, pieces, runs)

    def stats(self) -> PrefixStats:
        """Numbers so far."""
        with self._lock:
            return PrefixStats(
                num_nodes=len(self._by_use),
                resident_bytes=self._resident_bytes,
                capacity_bytes=self._capacity_bytes,
                num_matches=self._num_matches,
                num_hits=self._num_hits,
                num_reused_tokens=self._num_reused_tokens,
                num_evictions=self._num_evictions,
            )

    def _walk(self, namespace: str, steps: _Steps) -> list[_Found]:
        found: list[_Found] = []
        node = self._roots.get(namespace)
        done = 0
        while node is not None and done < len(steps):
            node = node.children.get(steps[done])
            if node is not None:
                num_matched = _count_common(node.steps, steps, done)
                found.append(_Found(node, done, num_matched))
                done += num_matched
                if num_matched < len(node.steps):
                    break
        return found

    def _attachment(self, namespace: str, found: list[_Found]) -> _Node | None:
        """The node that a new one goes behind; ``None`` where a split finds no room."""
        if not found:
            return self._roots.setdefault(namespace, _Node((), None, namespace=namespace))
        last = found[-1]
        if last.num_matched == len(last.node.steps):
            return last.node
        return self._split(last.node, last.num_matched)

    def _split(self, node: _Node, at: int) -> _Node | None:
        """Cut a node in two, and return the upper half; the lower one stays the node it was.

        Both get tensors of their own, so that evicting the lower half frees its bytes. Matches go
        on reading the old tensors, which stay counted until they are released.
        """
        keys, values = node.keys, node.values
        if keys is None or values is None or node.parent is None:
            raise StoreError("prefix cache: a node without KV was asked to split; report this")
        old_bytes = node.num_bytes
        if node.num_leases:
            if not self._make_room(old_bytes):
                return None
            node.lent_bytes += old_bytes
            self._resident_bytes += old_bytes
        upper = _Node(
            node.steps[:at],
            node.parent,
            keys[:, :, :at].clone(memory_format=torch.contiguous_format),
            values[:, :, :at].clone(memory_format=torch.contiguous_format),
        )
        node.parent.children[upper.steps[0]] = upper
        node.keys = keys[:, :, at:].clone(memory_format=torch.contiguous_format)
        node.values = values[:, :, at:].clone(memory_format=torch.contiguous_format)
        node.steps = node.steps[at:]
        node.parent = upper
        upper.children[node.steps[0]] = node
        self._by_use[upper] = None
        return upper

    def _grow(self, node: _Node, steps: _Steps, pieces: list[Span], runs: Sequence[Run]) -> int:
        """Hang one node per piece behind ``node``, until there is no room."""
        last_end = pieces[0].start
        for piece in pieces:
            is_chunk = _is_chunk(steps, piece)
            num_bytes = 0 if is_chunk else piece_bytes(piece, runs)
            node.num_leases += 1  # making room must not take what this hangs on
            has_room = self._make_room(num_bytes)
            node.num_leases -= 1
            if not has_room:
                break
            child = _Node(steps[piece.start : piece.end], node)
            if not is_chunk:
                child.keys, child.values = copy_piece(piece, runs)
            node.children[child.steps[0]] = child
            self._by_use[child] = None
            self._resident_bytes += child.num_bytes
            node = child
            if not is_chunk:
                last_end = piece.end
        if _is_useless(node):
            self._drop(node)
        return last_end - pieces[0].start

    def _make_room(self, num_bytes: int) -> bool:
        """Evict the longest unused leaves until ``num_bytes`` more fit; all or nothing."""
        excess = self._resident_bytes + num_bytes - self._capacity_bytes
        if excess <= 0:
            return True
        if num_bytes > self._capacity_bytes or self._evictable_bytes() < excess:
            return False
        while self._resident_bytes + num_bytes > self._capacity_bytes:
            leaf = next(n for n in self._by_use if not n.children and not n.num_leases)
            self._num_evictions += 1
            self._drop(leaf)
        return True

    def _evictable_bytes(self) -> int:
        """Bytes of all nodes that neither are leased nor stand before a leased one."""
        kept: set[_Node] = set()
        for leased in self._by_use:
            node: _Node | None = leased if leased.num_leases else None
            while node is not None and node not in kept:
                kept.add(node)
                node = node.parent
        return sum(node.num_bytes for node in self._by_use if node not in kept)

    def _drop(self, idle: _Node) -> None:
        """Take out a node that nothing follows, and the chunks and the root before it likewise."""
        node = idle
        while node.parent is not None:
            parent = node.parent
            del parent.children[node.steps[0]]
            del self._by_use[node]
            self._resident_bytes -= node.num_bytes
            node = parent
            if not _is_useless(node):
                return
        del self._roots[node.namespace]

    def _release(self, nodes: tuple[_Node, ...]) -> None:
        with self._lock:
            for node in nodes:
                node.num_leases -= 1
                if not node.num_leases:
                    self._resident_bytes -= node.lent_bytes
                    node.lent_bytes = 0
            if nodes and _is_useless(nodes[-1]):
                self._drop(nodes[-1])


def _is_useless(node: _Node) -> bool:
    """Whether a chunk or a root has nothing behind it, and nobody holds it."""
    return node.keys is None and not node.children and not node.num_leases


def _pair(symbols: Sequence[Symbol], positions: Sequence[int]) -> _Steps:
    if len(symbols) != len(positions):
        raise StoreError(
            f"prefix cache: {len(symbols)} symbols and {len(positions)} positions; every symbol "
            f"has one"
        )
    return tuple(zip(symbols, positions, strict=True))


def _count_common(node_steps: _Steps, steps: _Steps, first: int) -> int:
    window = steps[first : first + len(node_steps)]
    if window == node_steps:  # at the speed of C, and the usual case
        return len(node_steps)
    pairs = enumerate(zip(node_steps, window, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), len(window))


def _end_of(found: list[_Found]) -> int:
    return found[-1].first + found[-1].num_matched if found else 0


def _run_of(met: _Found) -> Run:
    node, num_tokens = met.node, met.num_matched
    if node.keys is None or node.values is None:
        raise StoreError("prefix cache: a node without KV was asked for its run; report this")
    return Run(
        keys=node.keys[:, :, :num_tokens],
        values=node.values[:, :, :num_tokens],
        start=node.steps[0][1],
        symbols=Span(met.first, met.first + num_tokens),
    )


def _is_chunk(steps: _Steps, piece: Span) -> bool:
    return isinstance(steps[piece.start][0], str)


def _cut(steps: _Steps, first: int) -> Iterator[Span]:
    """Pieces of ``steps`` from ``first`` on: single chunks, and tokens at consecutive positions."""
    start = first
    for index in range(first, len(steps)):
        symbol, position = steps[index]
        follower = None if index + 1 == len(steps) else steps[index + 1]
        continues = (
            follower is not None
            and not isinstance(symbol, str)
            and not isinstance(follower[0], str)
            and follower[1] == position + 1
        )
        if not continues:
            yield Span(start, index + 1)
            start = index + 1
