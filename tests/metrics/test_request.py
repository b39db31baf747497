"""The numbers of a request add up, and say why what was not served was not."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest

from pc_rag.errors import PromptCacheError
from pc_rag.metrics import ModuleUse
from pc_rag.types import FinishReason, HitKind, MissReason, Tier
from tests.support.metrics import ENCODED, HIT, MOVED, request_metrics, uncached_metrics


def test_rates_count_only_stored_tokens_when_some_were_encoded_now():
    """What the request had to encode itself is no hit."""
    metrics = request_metrics()
    assert metrics.num_cache_creation_tokens == 35
    assert metrics.num_cache_read_tokens == 65
    assert metrics.token_hit_rate == 65 / 150
    assert metrics.module_hit_rate == 2 / 3


def test_rates_are_zero_when_reuse_was_off():
    """The uncached arm reports no hits, with its reason on every module."""
    metrics = uncached_metrics()
    assert metrics.token_hit_rate == 0
    assert metrics.module_hit_rate == 0
    assert {use.miss_reason for use in metrics.modules} == {MissReason.REUSE_OFF}


def test_module_hit_rate_is_none_when_there_was_nothing_to_hit():
    """No modules is told apart from no hits."""
    assert request_metrics(modules=()).module_hit_rate is None


def test_assembly_is_all_but_computing_when_a_token_came():
    """Time that no phase measured is part of the assembly, so it cannot hide."""
    metrics = request_metrics()
    assert metrics.assembly_seconds == pytest.approx(1.0 - 0.2 - 0.5 - 0.1)
    assert metrics.unattributed_seconds == pytest.approx(0.05)


def test_assembly_is_the_sum_of_its_phases_when_no_token_came():
    """A request cancelled before its first token still says where time went."""
    metrics = request_metrics(
        ttft_seconds=None, num_generated_tokens=0, finish_reason=FinishReason.CANCELLED
    )
    assert metrics.assembly_seconds == pytest.approx(0.01 + 0.02 + 0.03 + 0.04 + 0.05)
    assert metrics.unattributed_seconds == 0
    assert metrics.is_cancelled


@pytest.mark.parametrize(("num_generated", "expected"), [(0, None), (1, None), (2, 0.4), (5, 0.1)])
def test_tpot_is_per_token_behind_the_first_when_several_were_generated(num_generated, expected):
    """The first token belongs to TTFT; one token has no time per further token."""
    assert request_metrics(num_generated_tokens=num_generated).tpot_seconds == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 151}, r"is 151, but cached \+ repaired \+ fresh is 100 \+ 20 \+ 30"),
        ({"num_fresh_tokens": -1}, "num_fresh_tokens is -1"),
        ({"num_reused_tokens": 66}, "66 reused and 35 encoded tokens are more than the 100"),
        ({"prefill_seconds": -0.1}, "prefill took -0.1 s"),
        ({"ttft_seconds": math.nan}, "ttft took nan s"),
        ({"decode_seconds": math.inf}, "decode took inf s"),
        ({"load_seconds": {Tier.DISK: -1.0}}, "load from disk took -1.0 s"),
    ],
)
def test_metrics_are_refused_when_they_contradict_themselves(changes, message):
    """A wrong count is an error where it is made, not a wrong dashboard later."""
    with pytest.raises(PromptCacheError, match=message):
        request_metrics(**changes)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({}, "a miss needs a reason"),
        ({"miss_reason": MissReason.IO, "tier": Tier.DISK}, "has no tier"),
        ({"hit_kind": HitKind.EXACT, "num_encoded_tokens": 1}, "a hit encodes nothing"),
        ({"miss_reason": MissReason.IO, "num_encoded_tokens": 11}, "11 encoded tokens of 10"),
        ({"miss_reason": MissReason.IO, "num_tokens": -1}, "num_tokens is -1"),
    ],
)
def test_module_use_is_refused_when_it_hides_or_invents_a_hit(use, message):
    """Every miss has its reason, and only what was stored before is a hit."""
    with pytest.raises(PromptCacheError, match=message):
        ModuleUse(**({"label": "rome", "num_tokens": 10} | use))


def test_metrics_do_not_change_when_the_caller_changes_its_mapping():
    """The metrics keep a copy of what they were given."""
    load_seconds = {Tier.DISK: 1.0}
    metrics = request_metrics(load_seconds=load_seconds)
    load_seconds[Tier.DISK] = 2.0
    assert metrics.load_seconds == {Tier.DISK: 1.0}


def test_metrics_are_equal_when_copied_through_pickle():
    """Workers can hand their numbers to another process."""
    metrics = request_metrics()
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert hash(metrics) == hash(request_metrics())


def test_dictionary_is_json_when_every_field_is_filled():
    """Every field and derived number survives JSON, enums as their words."""
    plain = request_metrics().to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert {each.name for each in dataclasses.fields(request_metrics())} < set(plain)
    assert plain["load_seconds"] == {"host": 0.03, "disk": 0.04}
    assert plain["finish_reason"] == "stop"
    assert plain["tpot_seconds"] == 0.1
    assert plain["is_cancelled"] is False
    assert plain["modules"] == [
        {
            "label": use.label,
            "num_tokens": use.num_tokens,
            "hit_kind": use.hit_kind and use.hit_kind.value,
            "tier": use.tier and use.tier.value,
            "miss_reason": use.miss_reason and use.miss_reason.value,
            "num_encoded_tokens": use.num_encoded_tokens,
        }
        for use in (HIT, MOVED, ENCODED)
    ]
