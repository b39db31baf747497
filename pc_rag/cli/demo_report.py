"""What the demo prints."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import transformers
from rich.table import Table

import pc_rag
from pc_rag.cli.answers import (
    comparison_dict,
    describe_hits,
    describe_usage,
)
from pc_rag.cli.output import bytes_text, key_value_table, out, ratio_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pc_rag.cli.answers import Comparison
    from pc_rag.cli.demo_run import DemoResult, DemoStart


def show_start(start: DemoStart) -> None:
    """Where the store comes from: this run, or an earlier one."""
    report = start.report
    if not report.num_encoded:
        out.print(f"0 chunks encoded: {start.num_earlier_chunks:,} chunks from an earlier run")
    else:
        earlier = ""
        if start.num_earlier_chunks:
            earlier = f"; {start.num_earlier_chunks:,} chunks from an earlier run"
        out.print(
            f"{report.num_encoded:,} chunks encoded ({report.num_encoded_tokens:,} tokens in "
            f"{seconds_text(report.seconds)}, {report.tokens_per_second:,.0f} tokens/s){earlier}"
        )


def show_answer(number: int, comparison: Comparison) -> None:
    """One question with its answer and what it cost."""
    out.print(f"\nQ{number}: {comparison.question}", style="bold", soft_wrap=True)
    out.print(f"A{number}: {comparison.cached.text.strip()}", soft_wrap=True)
    if comparison.uncached.completion.metrics.num_generated_tokens > 1:
        out.print(f"A{number} (uncached): {comparison.uncached.text.strip()}", soft_wrap=True)
    out.print(describe_usage(comparison.cached.completion.metrics), style="dim", soft_wrap=True)


def show_end(result: DemoResult) -> None:
    """The table of all questions with medians, and the store against theory."""
    out.print()
    out.print(_questions_table(result))
    note = "TTFT: one sample a question and arm, after a warm-up request; retrieval included."
    if result.max_uncached_tokens == 1:
        note += " The uncached arm was stopped after its first token."
    out.print(note, style="dim", soft_wrap=True)
    out.print()
    out.print(key_value_table(_store_rows(result)))


def _questions_table(result: DemoResult) -> Table:
    table = Table()
    table.add_column("")
    for column in ("TTFT cached", "uncached", "ratio", "cached/fresh", "hits"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, each in enumerate(result.comparisons, start=1):
        metrics = each.cached.completion.metrics
        table.add_row(
            f"Q{number}",
            seconds_text(metrics.ttft_seconds),
            seconds_text(each.uncached.completion.metrics.ttft_seconds),
            ratio_text(each.ttft_ratio),
            f"{metrics.num_cached_tokens:,}/{metrics.num_fresh_tokens:,}",
            describe_hits(metrics),
        )
    medians = _medians(result)
    table.add_section()
    table.add_row(
        "median",
        seconds_text(medians["ttft_cached_seconds"]),
        seconds_text(medians["ttft_uncached_seconds"]),
        ratio_text(medians["ttft_ratio"]),
        style="bold",
    )
    return table


def _medians(result: DemoResult) -> dict[str, float | None]:
    comparisons = result.comparisons
    return {
        "ttft_cached_seconds": _median(
            each.cached.completion.metrics.ttft_seconds for each in comparisons
        ),
        "ttft_uncached_seconds": _median(
            each.uncached.completion.metrics.ttft_seconds for each in comparisons
        ),
        "ttft_ratio": _median(each.ttft_ratio for each in comparisons),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _store_rows(result: DemoResult) -> list[tuple[str, str]]:
    start, entries = result.start, result.entries
    corpus = (
        f"{start.num_documents:,} documents, {start.num_chunks:,} chunks, "
        f"{start.num_tokens:,} tokens"
    )
    rows = [("model", f"{start.manifest.model} ({start.manifest.dtype})"), ("corpus", corpus)]
    if entries is None:
        return rows
    size = f"{bytes_text(entries.file_bytes)} for {entries.num_tokens:,} tokens"
    theory = (
        f"2 · {entries.num_layers} layers · {entries.num_kv_heads} kv_heads · "
        f"{entries.head_dim} head_dim · {entries.dtype} = {entries.theory_bytes_per_token:,}"
    )
    return [
        *rows,
        ("store", f"{size} in {entries.num_entries:,} entries"),
        ("bytes/token", f"{entries.bytes_per_token:,.1f} ({entries.overhead:+.2%} of theory)"),
        ("theory", theory),
    ]


def demo_dict(result: DemoResult) -> dict[str, Any]:
    """The whole result as JSON can say it, with the machine it was measured on."""
    start = result.start
    return {
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "cuda": torch.cuda.is_available(),
        },
        "versions": {
            "pc_rag": pc_rag.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": start.manifest.model,
        "dtype": start.manifest.dtype,
        "ingest": {
            **asdict(start.report),
            "tokens_per_second": start.report.tokens_per_second,
            "num_earlier_chunks": start.num_earlier_chunks,
        },
        "corpus": {
            "num_documents": start.num_documents,
            "num_chunks": start.num_chunks,
            "num_tokens": start.num_tokens,
        },
        "has_warm_up": True,
        "max_uncached_tokens": result.max_uncached_tokens,
        "questions": [comparison_dict(each) for each in result.comparisons],
        "medians": _medians(result),
        "store": result.entries.to_dict() if result.entries else None,
    }
