"""LlamaIndex LLM, ingestion and query engine on pc-rag's prompt cache."""
