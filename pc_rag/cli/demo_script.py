"""What the demo indexes and asks."""

from __future__ import annotations

TOPICS = (
    "assert", "async", "augassign", "await", "binary", "bitwise", "booleans", "break", "class",
    "context-managers", "continue", "conversions", "del", "dict", "else",
    "exceptions", "execmodel", "floating", "for", "function", "global", "if", "import", "in",
    "integers", "lambda", "lists", "nonlocal", "pass", "power", "raise", "return", "shifting",
    "slicings", "truth", "try", "unary", "while", "with", "yield",
)  # fmt: skip
"""Topics of the Python language reference, about 20,300 tokens of SmolLM2 in Python 3.11."""

QUESTIONS = (
    "Which exception does the division by zero raise?",
    "When are default parameter values evaluated?",
    "What does the bitwise & operator yield?",
    "What does the import statement do?",
    "What is a lambda expression?",
)
"""Questions that these topics answer."""

CHUNKS_A_QUESTION = 4
"""Chunks retrieved for each."""

MAX_NEW_TOKENS = 60
"""Longest answer; greedy."""

STOP = ("\n\n",)
"""An answer is one paragraph: behind it, a model of 135 million parameters repeats itself."""
