"""What holds for every schema, prompt and policy."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.layout import (
    EntryPiece,
    Fresh,
    LinkRepair,
    ModuleLayout,
    RunItem,
    TextPiece,
    UnionLayout,
    apply_repair,
    lay_out,
    plan_chunks,
    plan_prompt,
)
from pc_rag.pml import Import, Module, RoleBlock, Text, Union
from pc_rag.types import HitKind, ModuleKey, PositionPolicy, Visibility
from tests.support.char_encoder import CharEncoder, decode
from tests.support.pml_strategies import (
    PROMPT_LETTERS,
    SCHEMA_LETTERS,
    schemas,
    schemas_with_prompts,
)

policies = st.sampled_from(list(PositionPolicy))
visibilities = st.sampled_from([Visibility.MODULE, Visibility.PREFIX])


def laid_out(schema, visibility=Visibility.PREFIX, *, has_bos=True):
    return lay_out(schema, CharEncoder(has_bos=has_bos), visibility=visibility)


def planned(schema, prompt, policy, visibility=Visibility.PREFIX):
    return plan_prompt(
        laid_out(schema, visibility),
        prompt,
        CharEncoder(),
        policy=policy,
        entry_key=lambda index: ModuleKey(str(index)),
        max_position=None,
    )


def only(letters, text):
    return "".join(character for character in text if character in letters)


def schema_text(children, imports):
    """What a prompt with these imports reads of a schema: text, and imported modules."""
    imported = {node.name: node for node in imports if isinstance(node, Import)}
    found = ""
    for child in children:
        match child:
            case Text(text=text):
                found += text
            case RoleBlock(children=inner):
                found += schema_text(inner, imports)
            case Module() | Union():
                members = child.members if isinstance(child, Union) else (child,)
                for member in members:
                    if member.name in imported:
                        found += schema_text(member.children, imported[member.name].children)
    return found


def prompt_text(children):
    return "".join(
        child.text if isinstance(child, Text) else prompt_text(child.children) for child in children
    )


def check_items(items, start):
    """Items follow each other without gap or overlap; returns where they end."""
    for item in items:
        assert item.span.start == start
        if isinstance(item, ModuleLayout):
            assert check_items(item.items, start) == item.span.end
        elif isinstance(item, UnionLayout):
            ends = [check_items(member.items, start) for member in item.members]
            assert [member.span.end for member in item.members] == ends
            assert item.span.end == max(ends)
        start = item.span.end
    return start


@settings(deadline=None)
@given(schemas(), visibilities)
def test_spans_add_up_when_a_schema_is_laid_out(schema, visibility):
    """Sum rule: what follows starts where all before ends; a union counts its longest member."""
    layout = laid_out(schema, visibility)
    assert check_items(layout.items, 0) == layout.span.end
    assert all(len(run.token_ids) == len(run.span) > 0 for run in layout.runs)


@settings(deadline=None)
@given(schemas(), visibilities)
def test_context_lies_before_a_run_when_a_schema_is_laid_out(schema, visibility):
    """What a run attends is disjoint, in order, and ends before it: causal, whatever the prompt."""
    layout = laid_out(schema, visibility)
    for index, run in enumerate(layout.runs):
        chain = [*run.context, index]
        assert chain == sorted(set(chain))
        for before, behind in pairwise(chain):
            assert layout.runs[before].span.end <= layout.runs[behind].span.start


@settings(deadline=None)
@given(schemas())
def test_each_run_has_one_place_when_a_schema_is_laid_out(schema):
    """Every run is an item exactly once, so every text is stored exactly once."""

    def indexes(items):
        for item in items:
            if isinstance(item, RunItem):
                yield item.index
            elif isinstance(item, ModuleLayout):
                yield from indexes(item.items)
            else:
                for member in item.members:
                    yield from indexes(member.items)

    layout = laid_out(schema)
    assert list(indexes(layout.items)) == list(range(len(layout.runs)))


@settings(deadline=None)
@given(schemas_with_prompts(), policies)
def test_no_text_is_lost_when_a_prompt_is_planned(pair, policy):
    """The ids are those of the schema's present text and of the prompt's text, each in order."""
    schema, prompt = pair
    text = decode(planned(schema, prompt, policy).token_ids)
    body = text.replace("<generate>", "")
    for tag in ("bos", "system", "user", "assistant"):
        body = body.replace(f"<{tag}>", "").replace(f"</{tag}>", "")
    assert only(SCHEMA_LETTERS, body) == schema_text(schema.children, prompt.children)
    assert only(PROMPT_LETTERS, body) == prompt_text(prompt.children)
    assert len(body) == len(only(SCHEMA_LETTERS + PROMPT_LETTERS, body))
    assert text.count("<bos>") == 1
    assert text.startswith("<bos>")


@settings(deadline=None)
@given(schemas_with_prompts(), visibilities)
def test_policies_agree_when_they_plan_the_same_prompt(pair, visibility):
    """Policies move spans; tokens and their order stay, and reserved never starts earlier."""
    packed, reserved = (planned(*pair, policy, visibility) for policy in PositionPolicy)
    assert packed.token_ids == reserved.token_ids
    assert packed.position_ids == tuple(range(packed.num_tokens))
    assert all(p <= r for p, r in zip(packed.position_ids, reserved.position_ids, strict=True))
    assert reserved.position_ids == tuple(sorted(set(reserved.position_ids)))


@settings(deadline=None)
@given(schemas_with_prompts(), policies, visibilities)
def test_exact_hits_lead_a_plan_when_there_are_any(pair, policy, visibility):
    """An exact part is unmoved, and all before it is exact and is what its run attended."""
    layout = laid_out(pair[0], visibility)
    plan = planned(*pair, policy, visibility)
    seen = []
    for part in plan.parts:
        if isinstance(part, Fresh) or part.hit_kind is not HitKind.EXACT:
            break
        index = int(part.key)
        assert part.shift == 0
        assert layout.runs[index].context == tuple(seen)
        seen.append(index)
    assert all(part.hit_kind is not HitKind.EXACT for part in plan.cached[len(seen) :])


@settings(deadline=None)
@given(schemas_with_prompts(), policies)
def test_last_token_is_fresh_when_a_prompt_is_planned(pair, policy):
    """Its logits choose the first new token."""
    assert isinstance(planned(*pair, policy).parts[-1], Fresh)


@settings(deadline=None)
@given(schemas_with_prompts(), policies, st.integers(1, 5))
def test_tokens_and_positions_stay_when_reuse_or_repair_change(pair, policy, num_tokens):
    """The uncached arm and every repair read the same ids at the same positions."""
    plan = planned(*pair, policy)
    uncached = plan.without_reuse()
    repaired = apply_repair(plan, LinkRepair(num_tokens), lambda part: part.label.startswith("m"))
    for other in (uncached, repaired):
        assert other.token_ids == plan.token_ids
        assert other.position_ids == plan.position_ids
    assert uncached.num_cached_tokens == 0
    assert repaired.num_cached_tokens <= plan.num_cached_tokens


@st.composite
def corpus_pieces(draw):
    pieces = []
    for number in range(draw(st.integers(0, 6))):
        token_ids = tuple(range(draw(st.integers(0, 8))))
        if draw(st.booleans()):
            pieces.append(TextPiece(token_ids))
        else:
            pieces.append(
                EntryPiece(
                    label=f"chunk {number}",
                    key=ModuleKey(str(number)),
                    token_ids=token_ids,
                    encoded_start=draw(st.integers(0, 20)),
                    context_is_prefix=draw(st.booleans()),
                )
            )
    return [*pieces, TextPiece((7,))]


@settings(deadline=None)
@given(corpus_pieces(), policies, st.integers(8, 20), st.integers(1, 4))
def test_pieces_stay_in_order_when_chunks_are_planned(pieces, policy, slot_tokens, num_tokens):
    """Ids are those of the pieces; spans are disjoint; repair and reuse move nothing."""
    plan = plan_chunks(pieces, policy=policy, slot_tokens=slot_tokens)
    assert plan.token_ids == tuple(i for piece in pieces for i in piece.token_ids)
    assert plan.position_ids == tuple(sorted(set(plan.position_ids)))
    if policy is PositionPolicy.PACKED:
        assert plan.position_ids == tuple(range(plan.num_tokens))
    repaired = apply_repair(plan, LinkRepair(num_tokens), lambda part: bool(part.label))
    assert repaired.token_ids == plan.token_ids
    assert repaired.position_ids == plan.position_ids
    assert plan.without_reuse().position_ids == plan.position_ids


@settings(deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(8, 20))
def test_chunk_lies_in_its_slot_when_no_text_pushes_it(lengths, slot_tokens):
    """Slot i holds chunk i, whatever its length."""
    pieces = [
        EntryPiece(
            label=str(number),
            key=ModuleKey(str(number)),
            token_ids=(1,) * length,
            encoded_start=0,
            context_is_prefix=True,
        )
        for number, length in enumerate(lengths)
    ]
    plan = plan_chunks(
        [*pieces, TextPiece((2,))], policy=PositionPolicy.RESERVED, slot_tokens=slot_tokens
    )
    assert [part.span.start for part in plan.cached] == [
        number * slot_tokens for number in range(len(lengths))
    ]
