"""Stored keys and values: entries, their keys, the tiers that hold them."""
