"""Bringing stored entries from a lower tier into the nearest, before a request asks for them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from pc_rag.engine.background import BackgroundWork
from pc_rag.errors import CorruptEntry, EntryNotFound, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from pc_rag.engine.request import Request
    from pc_rag.kv.base import KVStore
    from pc_rag.kv.key import EntryAddress
    from pc_rag.types import Tier

_CPU = torch.device("cpu")
"""Where leases put the tensors: the nearest tier takes them, and no device has to."""


class Prefetcher:
    """Brings entries near, one after the other, in the background. Thread-safe.

    It computes nothing, and holds the lease of one entry at a time. What no tier holds, or holds
    damaged, is passed over: the request that reads it computes it.

    Args:
        store: Where entries are kept.
        bytes_per_token: Of one token's KV as stored.
        warms_siblings: Whether ``warm_siblings`` does anything.
    """

    def __init__(self, store: KVStore, *, bytes_per_token: int, warms_siblings: bool) -> None:
        self._store = store
        self._bytes_per_token = bytes_per_token
        self._warms_siblings = warms_siblings
        self._background = BackgroundWork[int](
            "pc-rag-prefetch", when_closed="the engine is closed; open it again to prefetch"
        )

    def prefetch(self, addresses: Sequence[EntryAddress]) -> Future[int]:
        """Bring entries near, in this order, as far as the nearest tier holds them together.

        Returns:
            Resolves to how many came from a lower tier, or to the error that ended it.

        Raises:
            StoreError: This was closed, or the process is ending.
        """
        key = tuple(address.key for address in addresses)
        return self._background.submit(key, lambda: self._bring_near(addresses))

    def warm_siblings(self, request: Request) -> None:
        """Bring near what a request could have imported instead of members of unions.

        What it did import comes first, which counts as a use: its siblings do not take its place.
        A request does not depend on it, so nothing is raised.
        """
        if not self._warms_siblings:
            return
        recipes = request.recipes
        used = dict.fromkeys(part.key for part in request.plan.cached)
        siblings = {s: None for key in used for s in recipes[key].siblings if s in recipes}
        if siblings.keys() - used.keys():
            with suppress(StoreError):
                self.prefetch([recipes[key].address for key in used | siblings])

    def close(self) -> None:
        """Cancel what waits, and end what runs behind its next entry. Idempotent."""
        self._background.close()

    def _bring_near(self, addresses: Sequence[EntryAddress]) -> int:
        nearest, *lower = self._store.stats()
        if not lower:
            return 0
        room, num_brought = nearest.capacity_bytes, 0
        for address in addresses:
            if self._background.is_ending:
                break
            if room is not None:
                num_bytes = len(address.token_ids) * self._bytes_per_token
                if num_bytes > room:
                    continue  # it would take the place of what has just been brought
                room -= num_bytes
            num_brought += self._bring(address, nearest.tier)
        return num_brought

    def _bring(self, address: EntryAddress, nearest: Tier) -> bool:
        """Whether an entry came from a lower tier, and is in the nearest now."""
        try:
            # A lease brings the entry near, and giving it back leaves it there.
            with self._store.lease(address, _CPU) as lease:
                came_from = lease.tier
        except (EntryNotFound, CorruptEntry):
            return False
        return came_from is not nearest and self._store.lookup(address).tier is nearest
