"""Attention over stored KV: what a request attends, and how."""
