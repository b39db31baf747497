"""What the demo indexes and asks."""

from __future__ import annotations

TOPICS = (
    "assert", "async", "augassign", "await", "binary", "bitwise", "booleans", "break", "class",
    "comparisons", "context-managers", "continue", "conversions", "del", "dict", "else",
    "exceptions", "execmodel", "floating", "for", "function", "global", "if", "import", "in",
    "integers", "lambda", "lists", "nonlocal", "pass", "power", "raise", "return", "shifting",
    "slicings", "truth", "try", "unary", "while", "with", "yield",
)  # fmt: skip
"""Topics of the Python language reference, about 22,900 tokens of SmolLM2 in Python 3.11."""

QUESTIONS = ("What does the nonlocal statement do?",)
"""Questions that these topics answer."""

CHUNKS_A_QUESTION = 4
"""Chunks retrieved for each."""

MAX_NEW_TOKENS = 48
"""Longest answer; greedy."""
