"""The command line: one file a command, thin; ``app`` is what ``pc-rag`` runs."""

from pc_rag.cli.main import app

__all__ = ["app"]
