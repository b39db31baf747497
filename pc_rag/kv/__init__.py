"""Stored keys and values: entries, their keys, the tiers that hold them, the prefix cache."""

from pc_rag.kv.base import IntegrityReport, KVStore, Lease, LookupResult, StoreStats
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.entry import Entry
from pc_rag.kv.key import FORMAT_VERSION, EntryAddress, VisibilityContext
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.policy import EvictionPolicy, LruPolicy
from pc_rag.kv.prefix_match import PrefixMatch, PrefixStats, Run, Symbol
from pc_rag.kv.prefix_tree import PrefixTree
from pc_rag.kv.tiered_store import TieredStore

__all__ = [
    "FORMAT_VERSION",
    "DiskTier",
    "Entry",
    "EntryAddress",
    "EvictionPolicy",
    "IntegrityReport",
    "KVStore",
    "Lease",
    "LookupResult",
    "LruPolicy",
    "MemoryTier",
    "PrefixMatch",
    "PrefixStats",
    "PrefixTree",
    "Run",
    "StoreStats",
    "Symbol",
    "TieredStore",
    "VisibilityContext",
]
