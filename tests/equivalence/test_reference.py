"""The oracle is proved before it proves anything: against stock models, and against itself."""

from __future__ import annotations

import pytest
import torch

from pc_rag.layout.plan import Cached, Fresh, RequestPlan
from pc_rag.types import ModuleKey, Placement, Span
from tests.support.architectures import ARCHITECTURES
from tests.support.reference import Module, assembled_logits, full_logits, masked_logits
from tests.support.tiny_models import tiny_model

PREFIX = tuple(range(10, 27))
CHUNKS = (tuple(range(40, 71)), tuple(range(90, 103)))
QUESTION = (200, 3, 77)
MOVABLE = [name for name, row in ARCHITECTURES.items() if row.placement is not Placement.FIXED]
TOLERANCE = {"atol": 3e-5, "rtol": 0.0}


def plan_of(modules, *placed):
    """A plan of (key, start) for modules and of (token ids, start) for text."""
    parts = []
    for what, start in placed:
        if not isinstance(what, str):
            parts.append(Fresh(token_ids=what, span=Span(start, start + len(what))))
            continue
        module = modules[what]
        num_tokens = len(module.token_ids)
        parts.append(
            Cached(
                label=what,
                key=ModuleKey(what),
                token_ids=module.token_ids,
                span=Span(start, start + num_tokens),
                rows=Span(0, num_tokens),
                encoded_start=module.start,
            )
        )
    return RequestPlan(tuple(parts))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_oracle_equals_the_stock_model_when_no_module_is_used(name):
    """Masks, windows and biases made from position IDs are those that the model itself makes."""
    model, _ = tiny_model(name)
    ids = PREFIX + CHUNKS[0] + QUESTION
    with torch.no_grad():
        stock = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(full_logits(model, ids, range(len(ids))), stock, **TOLERANCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_both_oracles_agree_when_entries_stay_where_they_were_encoded(name):
    """One pass under a dense mask equals modules on their own, with gaps between them."""
    model, _ = tiny_model(name)
    behind = (PREFIX, tuple(range(len(PREFIX))))
    modules = {
        "prefix": Module(PREFIX, 0),
        "near": Module(CHUNKS[0], 17, *behind),
        "far": Module(CHUNKS[1], 80, *behind),
    }
    plan = plan_of(modules, ("prefix", 0), ("near", 17), ((5, 6), 48), ("far", 80), (QUESTION, 100))
    torch.testing.assert_close(
        assembled_logits(model, plan, modules), masked_logits(model, plan, modules), **TOLERANCE
    )


@pytest.mark.parametrize("name", MOVABLE)
def test_both_oracles_agree_when_entries_that_saw_themselves_only_moved(name):
    """Keys moved in float64 are those that the stock model has at that place."""
    model, _ = tiny_model(name)
    modules = {"first": Module(CHUNKS[0], 0), "second": Module(CHUNKS[1], 40)}
    plan = plan_of(modules, ("first", 0), ((5, 6), 33), ("second", 350), (QUESTION, 370))
    moved = assembled_logits(model, plan, modules)
    torch.testing.assert_close(moved, masked_logits(model, plan, modules), **TOLERANCE)
    if ARCHITECTURES[name].placement is Placement.ROTATE:
        astray = assembled_logits(model, plan, modules | {"second": Module(CHUNKS[1], 41)})
        assert (moved - astray).abs().max() > 1e-3, "one position more or less makes no difference"
