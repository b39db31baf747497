"""E2 and E4 for what PML adds: arguments, scaffolds, default members, modules that are not stored.

Real plans of real schemas, run from entries that the package encodes, against references that it
has no part in.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pc_rag.layout import Cached, FreshKind, lay_out, plan_prompt
from pc_rag.pml import Import, Module, Prompt, Schema, Text, Union
from pc_rag.pml.nodes import Parameter, Scaffold
from pc_rag.types import HitKind, PositionPolicy, Visibility
from tests.support.char_encoder import CharEncoder
from tests.support.reference import assembled_logits, full_logits, masked_logits
from tests.support.requests import Workbench
from tests.support.tiny_models import tiny_model

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
QUESTION = Text(" Where to, and when?")
VISIBILITIES = [Visibility.MODULE, Visibility.PREFIX]


class ByteEncoder(CharEncoder):
    """Characters below 256 are tokens of the tiny models; so are the placeholder and the space."""

    def __init__(self) -> None:
        super().__init__(has_bos=False)

    def placeholder_id(self) -> int:
        return 256


@pytest.fixture(params=["llama", "gpt_neox"])
def bench(request):
    return Workbench(tiny_model(request.param)[0])


def module(name, *children, **options):
    return Module(name, tuple(Text(c) if isinstance(c, str) else c for c in children), **options)


def planned(bench, schema, *children, policy, visibility, **arguments):
    """The layout and the plan of a prompt, with every entry that it reads encoded."""
    encoder = ByteEncoder()
    layout = lay_out(schema, encoder, visibility=visibility)
    entries = []
    for run in layout.runs:
        context = tuple(entries[index] for index in run.context)
        entries.append(bench.encode(run.token_ids, start=run.span.start, context=context))
    plan = plan_prompt(
        layout,
        Prompt("s", (*children, QUESTION), arguments=arguments),
        encoder,
        policy=policy,
        entry_key=lambda index: entries[index].address.key,
        max_position=None,
    )
    return layout, plan


def policies(test):
    test = pytest.mark.parametrize("policy", list(PositionPolicy))(test)
    return pytest.mark.parametrize("visibility", VISIBILITIES)(test)


def parameter(name="p"):
    return Parameter(name=name, max_tokens=6)


PLACES = {
    "middle": lambda p: ("We stay for ", p, " days in Rome."),
    "start": lambda p: (p, " days in Rome."),
    "end": lambda p: ("We go to Rome in ", p),
    "only": lambda p: (p,),
}
ARGUMENTS = {"short": "two", "exact": "eleven", "empty": ""}


@policies
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("argument", [*ARGUMENTS, "padded"])
def test_e2_arguments_equal_the_reference(bench, policy, visibility, place, argument):
    """E2: text around an argument from its entry, at gaps or without, moved or not."""
    pads, text = argument == "padded", ARGUMENTS.get(argument, "two")
    schema = Schema(
        "s",
        (
            Text("Plan a trip. "),
            Union((module("a", "Short."), module("b", "A much longer text than that."))),
            module("trip", *PLACES[place](Parameter(name="p", max_tokens=6, pads_with_space=pads))),
            module("more", " Spend little."),
        ),
    )
    imports = (Import("a"), Import("trip", arguments={"p": text}), Import("more"))
    _, plan = planned(bench, schema, *imports, policy=policy, visibility=visibility)
    num_argument = 6 if pads else len(text)
    found = [part for part in plan.fresh if part.kind is FreshKind.ARGUMENT]
    assert sum(len(part.token_ids) for part in found) == num_argument
    expected = assembled_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)
    if policy is PositionPolicy.RESERVED or visibility is Visibility.MODULE:
        masked = masked_logits(bench.model, plan, bench.modules)
        torch.testing.assert_close(expected, masked, **TOLERANCE)


@policies
def test_argument_is_read_when_text_lies_around_it(bench, policy, visibility):
    """Another argument gives other logits: they are no function of the stored entries alone."""
    schema = Schema("s", (Text("Plan. "), module("trip", "For ", parameter(), " days.")))
    logits = []
    for text in ("two", "ten"):
        node = Import("trip", arguments={"p": text})
        _, plan = planned(bench, schema, node, policy=policy, visibility=visibility)
        logits.append(bench.logits(plan))
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@policies
def test_placeholders_never_reach_a_request_when_their_rows_are_poisoned(bench, policy, visibility):
    """Rows of placeholders, set to NaN in every entry, change nothing."""
    members = (module("a", parameter("x"), "left "), module("b", " right ", parameter("x")))
    schema = Schema(
        "s",
        (Text("Plan. "), parameter(), Text(" for "), Scaffold("pair", members), Text(" end.")),
    )
    nodes = [Import(name, arguments={"x": "one"}) for name in "ab"]
    for imports in (nodes, nodes[:1], nodes[1:]):
        layout, plan = planned(
            bench, schema, *imports, policy=policy, visibility=visibility, p="me"
        )
        expected = bench.logits(plan)
        held = dict(bench.entries)
        for run in layout.runs:
            for key, entry in held.items():
                address = entry.address
                if (address.token_ids, address.start) == (run.token_ids, run.span.start):
                    bench.entries[key] = poisoned(entry, [p.rows for p in run.parameters])
        assert any(entry.keys.isnan().any() for entry in bench.entries.values())
        assert bench.logits(plan).equal(expected)
        bench.entries |= held


def poisoned(entry, spans):
    keys, values = entry.keys.clone(), entry.values.clone()
    for span in spans:
        keys[:, :, span.start : span.end] = torch.nan
        values[:, :, span.start : span.end] = torch.nan
    return replace(entry, keys=keys, values=values)


PAIR = Schema(
    "s",
    (
        Text("Read both reports. "),
        Scaffold(
            "pair",
            (
                module("a", "Alice has three red apples. "),
                module("b", "Bob has four more than Alice. "),
                module("c", "Carol has none."),
            ),
        ),
    ),
)


@pytest.mark.parametrize("policy", list(PositionPolicy))
@pytest.mark.parametrize("nodes", [[Import("pair")], [Import(name) for name in "abc"]])
def test_scaffold_entry_equals_joint_prefill(bench, policy, nodes):
    """E4: KV of its members computed together; with prefix and question it is full prefill."""
    layout, plan = planned(bench, PAIR, *nodes, policy=policy, visibility=Visibility.PREFIX)
    assert {part.hit_kind for part in plan.cached} == {HitKind.EXACT}
    (key,) = {part.key for part in plan.cached[1:]}
    entry = bench.entries[key]
    text = "".join(m.children[0].text for m in PAIR.children[1].members)
    head = PAIR.children[0].text
    prefix = bench.encode(tuple(map(ord, head)), start=0)
    jointly = bench.encode(tuple(map(ord, text)), start=len(head), context=(prefix,))
    torch.testing.assert_close(entry.keys, jointly.keys, **TOLERANCE)
    torch.testing.assert_close(entry.values, jointly.values, **TOLERANCE)
    assert plan.token_ids == tuple(map(ord, head + text + QUESTION.text))
    expected = full_logits(bench.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)
    own = bench.encode(layout.runs[2].token_ids, start=layout.runs[2].span.start, context=(prefix,))
    row = own.address.start - len(head)
    difference = (own.keys - entry.keys[:, :, row : row + own.num_tokens]).abs().max()
    assert difference > 1e-2, "a member's own entry has seen the others"


@policies
@pytest.mark.parametrize("gap", [(), (Text(" (later) "),)])
def test_e2_scaffolds_equal_the_reference(bench, policy, visibility, gap):
    """E2: joint rows moved, with text between the members, or behind another module."""
    schema = Schema(
        "s",
        (
            Text("Read. "),
            Union((module("x", "Short."), module("y", "A much longer text than that."))),
            Scaffold("pair", (module("a", "One, ", parameter(), "."), module("b", " two."))),
            Text("End."),
        ),
    )
    nodes = (Import("x"), Import("a", arguments={"p": "uno"}), *gap, Import("b"))
    layout, plan = planned(bench, schema, *nodes, policy=policy, visibility=visibility)
    joint = layout.runs[layout.items[2].joint_index]
    read = [
        part for part in plan.cached if bench.entries[part.key].address.start == joint.span.start
    ]
    assert [part.label for part in read] == ["a", "a", "b"]
    expected = assembled_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)


def test_default_member_gives_exact_hits_when_a_union_names_it(bench):
    """What stands behind the union equals full prefill where that member is imported."""
    union = Union(
        (module("long", "A long default text. "), module("x", "Short. ")), scaffold="long"
    )
    schema = Schema("s", (Text("Head. "), union, Text("Middle. "), module("c", "Last.")))
    for name, is_exact in (("long", True), ("x", False)):
        nodes = (Import(name), Import("c"))
        _, plan = planned(
            bench, schema, *nodes, policy=PositionPolicy.RESERVED, visibility=Visibility.PREFIX
        )
        assert ({part.hit_kind for part in plan.cached} == {HitKind.EXACT}) is is_exact
        full = full_logits(bench.model, plan.token_ids, plan.position_ids)
        assert torch.allclose(bench.logits(plan), full, **TOLERANCE) is is_exact
        expected = assembled_logits(bench.model, plan, bench.modules)
        torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)


@policies
def test_e2_modules_that_are_not_stored_equal_the_reference(bench, policy, visibility):
    """They see all that is before them, at their spans, as in full prefill."""
    schema = Schema(
        "s",
        (
            Text("Head. "),
            module("u", "Today: ", parameter(), is_cached=False),
            module("c", "Last."),
        ),
    )
    node = Import("u", arguments={"p": "rain"})
    _, plan = planned(bench, schema, node, policy=policy, visibility=visibility)
    assert [part.label for part in plan.parts if isinstance(part, Cached)] == ["(anonymous)"]
    full = full_logits(bench.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(bench.logits(plan), full, **TOLERANCE)
    _, plan = planned(bench, schema, node, Import("c"), policy=policy, visibility=visibility)
    expected = assembled_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)
