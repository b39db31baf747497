"""Prompt Cache for RAG: every corpus chunk is prefilled once, then reused by every question."""
