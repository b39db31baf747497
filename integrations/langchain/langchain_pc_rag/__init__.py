"""LangChain models, indexes and callbacks on pc-rag's prompt cache."""
