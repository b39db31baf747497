"""Exports are plain values that other tools can read."""

from __future__ import annotations

import json
import math

import pytest

from pc_rag.errors import PromptCacheError
from pc_rag.metrics import CacheStats, to_json, to_plain
from pc_rag.types import Tier
from tests.support.metrics import request_metrics


def test_json_holds_derived_numbers_when_a_request_is_exported():
    """A reader of the JSON needs no formula of ours."""
    metrics = request_metrics(template="café")
    text = to_json(metrics)
    assert "café" in text
    assert json.loads(text) == metrics.to_dict()


def test_json_holds_total_and_groups_when_a_snapshot_is_exported():
    """The sums and each group are there, zeros included."""
    stats = CacheStats()
    stats.record(request_metrics())
    exported = json.loads(to_json(stats.snapshot(), indent=2))
    assert exported["total"]["requests"] == {"completed": 1, "cancelled": 0, "failed": 0}
    assert exported["total"]["token_hit_rate"] == 65 / 150
    assert exported["groups"][0]["template"] == "travel"
    assert exported["groups"][0]["ttft"]["p95_seconds"] == 1.0


def test_mapping_keys_become_text_when_they_are_enums():
    """JSON objects have text keys."""
    assert to_plain({Tier.DISK: (1, None, True)}) == {"disk": [1, None, True]}


@pytest.mark.parametrize("value", [object(), {"a": {1}}, math.nan, [math.inf], Tier])
def test_value_is_refused_when_json_cannot_say_it(value):
    """Nothing is exported as its `repr`."""
    with pytest.raises(PromptCacheError, match="cannot be exported"):
        to_plain(value)
