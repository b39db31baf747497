"""Statistics as text never leave a reader with a bare zero."""

from __future__ import annotations

import pytest

from pc_rag.metrics import CacheStats
from pc_rag.metrics.text import (
    REASONS,
    misses_text,
    savings_text,
    seconds_text,
    stats_text,
    table_text,
)
from pc_rag.types import MissReason
from tests.support.metrics import request_metrics, uncached_metrics


def text_of(*requests):
    stats = CacheStats()
    for each in requests:
        stats.record(each)
    return stats_text(stats.snapshot())


def test_every_reason_is_explained():
    """A new reason needs its sentence."""
    assert set(REASONS) == set(MissReason)


def test_text_has_rows_and_reasons_when_requests_were_recorded():
    """A row for each template and for all, and every miss with what it means."""
    text = text_of(
        request_metrics(prefill_tokens_per_second=100.0),
        uncached_metrics(template="legal", tenant=""),
    )
    lines = text.splitlines()
    assert lines[0] == "requests: 2 completed, 0 cancelled, 0 failed"
    assert "travel (acme)" in text
    assert "2 of 3 (66.7%)" in text
    assert "0 of 3 (0.0%)" in text
    assert "2 of 6 (33.3%)" in text
    assert "about 510.0 ms" in text
    assert f"3  reuse-off: {REASONS[MissReason.REUSE_OFF]}" in text
    assert "hits that could have been better:" in text


def test_one_row_is_of_all_when_requests_had_no_template():
    """Theirs says that they had none."""
    text = text_of(request_metrics(template="", tenant=""), request_metrics(template=""))
    labels = [line.split("  ")[0] for line in text.splitlines()[3:6]]
    assert labels == ["(no template)", "(no template) (acme)", "all"]


def test_unknown_savings_are_told_when_others_are_known():
    """A sum of some is not taken for one of all."""
    text = text_of(request_metrics(prefill_tokens_per_second=100.0), request_metrics())
    assert "about 510.0 ms (unknown for 1 more requests)" in text


def test_text_says_so_when_nothing_could_be_hit():
    """No requests, no modules and no hits are three things."""
    assert "no request was counted" in text_of()
    assert "no module stood in any prompt" in text_of(
        request_metrics(modules=(), num_reused_tokens=100)
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0123, "12.3 ms"), (-0.5, "-500.0 ms"), (1234.5, "1,234.50 s")],
)
def test_duration_has_its_unit(seconds, text):
    """Milliseconds below a second."""
    assert seconds_text(seconds) == text


def test_saving_is_unknown_when_no_request_knows_it():
    """Unknown is told from nothing recorded, and from a sum."""
    assert "no plain prefill was timed" in savings_text(0.0, num_unknown=2, num_known=0)
    assert savings_text(0.0, num_unknown=0, num_known=0) == "-"
    assert savings_text(2.0, num_unknown=0, num_known=1) == "about 2.00 s"


def test_columns_line_up_when_cells_differ():
    """Names flush left, numbers flush right."""
    assert (
        table_text(("a", "n"), [("long", "1"), ("b", "100")]) == "a       n\nlong    1\nb     100"
    )


def test_misses_are_none_when_there_were_none():
    """Said in a word."""
    assert misses_text({MissReason.IO: 0}, title="misses") == ["misses: none"]
