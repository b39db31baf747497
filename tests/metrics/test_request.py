"""The numbers of a request add up, and say why what was not served was not."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.errors import PromptCacheError
from pc_rag.metrics import ModuleUse, RequestMetrics
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
        ({"prefill_tokens_per_second": 0.0}, "prefill_tokens_per_second is 0.0"),
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


def test_saving_is_computing_less_fetching_when_the_rate_is_known():
    """65 tokens at 100 a second, less looking up, loading and assembling."""
    metrics = request_metrics(prefill_tokens_per_second=100.0)
    assert metrics.saved_seconds == pytest.approx(0.65 - (0.02 + 0.03 + 0.04 + 0.05))
    assert metrics.to_dict()["saved_seconds"] == metrics.saved_seconds


def test_saving_is_negative_when_fetching_took_longer():
    """A slow disk is not hidden behind a zero."""
    metrics = request_metrics(prefill_tokens_per_second=65_000.0)
    assert metrics.saved_seconds == pytest.approx(0.001 - 0.14)


def test_saving_is_unknown_when_the_rate_is():
    """Nobody guesses before a pass was measured."""
    assert request_metrics().saved_seconds is None


@pytest.mark.parametrize("rate", [None, 100.0])
def test_nothing_is_saved_when_nothing_was_read(rate):
    """Known without a rate; what looking in vain took is no negative saving."""
    assert uncached_metrics(prefill_tokens_per_second=rate).saved_seconds == 0


def test_numbers_are_read_back_when_they_were_written_before_there_was_a_rate():
    """Only of that key: another that is missing is an error."""
    plain = request_metrics().to_dict()
    del plain["prefill_tokens_per_second"]
    assert RequestMetrics.from_dict(plain) == request_metrics()


SECONDS = st.floats(0, 1e6, allow_nan=False)
COUNTS = st.integers(0, 10_000)


@st.composite
def module_uses(draw):
    """Hits, encoded misses and computed misses."""
    num_tokens = draw(COUNTS)
    use = {"label": draw(st.text(max_size=8)), "num_tokens": num_tokens}
    if draw(st.booleans()):
        return ModuleUse(
            **use,
            hit_kind=draw(st.sampled_from(HitKind)),
            tier=draw(st.none() | st.sampled_from(Tier)),
            miss_reason=draw(st.none() | st.sampled_from(MissReason)),
        )
    return ModuleUse(
        **use,
        miss_reason=draw(st.sampled_from(MissReason)),
        num_encoded_tokens=draw(st.integers(0, num_tokens)),
    )


@st.composite
def any_metrics(draw):
    """Metrics of every field's every kind of value."""
    modules = tuple(draw(st.lists(module_uses(), max_size=4)))
    reused, read = draw(COUNTS), draw(COUNTS)
    cached = reused + read + sum(use.num_encoded_tokens for use in modules)
    repaired, fresh = draw(COUNTS), draw(COUNTS)
    phases = ("retrieve", "plan", "lookup", "encode", "assemble", "prefill", "first_token")
    times = {f"{phase}_seconds": draw(SECONDS) for phase in (*phases, "decode", "held_back")}
    return RequestMetrics(
        prompt_tokens=cached + repaired + fresh,
        num_cached_tokens=cached,
        num_fresh_tokens=fresh,
        num_reused_tokens=reused,
        num_repaired_tokens=repaired,
        num_generated_tokens=draw(COUNTS),
        ttft_seconds=draw(st.none() | SECONDS),
        load_seconds=draw(st.dictionaries(st.sampled_from(Tier), SECONDS)),
        num_decode_steps=draw(st.none() | COUNTS),
        modules=modules,
        template=draw(st.text(max_size=8)),
        tenant=draw(st.text(max_size=8)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        prefill_tokens_per_second=draw(st.none() | st.floats(0.1, 1e6)),
        **times,
    )


@given(metrics=any_metrics())
def test_metrics_are_equal_when_read_back_from_json(metrics):
    """``from_dict`` is the exact inverse of ``to_dict``, JSON between them included."""
    plain = json.loads(json.dumps(metrics.to_dict(), allow_nan=False))
    assert RequestMetrics.from_dict(plain) == metrics


def test_metrics_are_read_when_a_newer_writer_added_keys():
    """Unknown keys are ignored, in modules too; derived numbers are not believed."""
    plain = request_metrics().to_dict() | {"new": 1, "token_hit_rate": 7}
    plain["modules"][0]["new"] = [1]
    assert RequestMetrics.from_dict(plain) == request_metrics()


@pytest.mark.parametrize(
    "key",
    [
        each.name
        for each in dataclasses.fields(RequestMetrics)
        if each.name != "prefill_tokens_per_second"  # it came later, see above
    ],
)
def test_key_is_named_when_it_is_missing(key):
    """Half a dictionary is refused by the name of what is not there."""
    plain = request_metrics().to_dict()
    del plain[key]
    with pytest.raises(PromptCacheError, match=f"'{key}' is missing"):
        RequestMetrics.from_dict(plain)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt_tokens", "150"),
        ("prompt_tokens", 150.0),
        ("prompt_tokens", True),
        ("prompt_tokens", None),
        ("num_decode_steps", 1.5),
        ("ttft_seconds", "fast"),
        ("plan_seconds", None),
        ("plan_seconds", False),
        ("plan_seconds", 10**400),
        ("load_seconds", []),
        ("load_seconds", {"tape": 1.0}),
        ("load_seconds", {"disk": None}),
        ("modules", {}),
        ("template", 3),
        ("finish_reason", "bored"),
        ("finish_reason", ["stop"]),
    ],
)
def test_key_is_named_when_it_is_malformed(key, value):
    """A value of another kind is refused by its name, not misread."""
    with pytest.raises(PromptCacheError, match=f"'{key}' is "):
        RequestMetrics.from_dict(request_metrics().to_dict() | {key: value})


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({"miss_reason": "shy"}, r"'modules'\[0\]: 'miss_reason' is 'shy'; expected one of not-st"),
        ({"num_tokens": None}, r"'modules'\[0\]: 'num_tokens' is None"),
    ],
)
def test_module_is_named_when_its_key_is_malformed(use, message):
    """The message leads to the module and its key."""
    plain = request_metrics().to_dict()
    plain["modules"][0] |= use
    with pytest.raises(PromptCacheError, match=message):
        RequestMetrics.from_dict(plain)


@pytest.mark.parametrize("plain", [None, [], "x"])
def test_metrics_are_refused_when_they_are_no_mapping(plain):
    """Anything may stand under our key in a response."""
    with pytest.raises(PromptCacheError, match="expected a mapping"):
        RequestMetrics.from_dict(plain)
