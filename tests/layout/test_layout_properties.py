"""What holds for every schema, prompt and policy."""

from __future__ import annotations

from itertools import pairwise, takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.layout import (
    EntryPiece,
    Fresh,
    FreshKind,
    LinkRepair,
    ModuleLayout,
    RowKind,
    RunItem,
    ScaffoldLayout,
    TextPiece,
    UnionLayout,
    apply_repair,
    lay_out,
    layout_rows,
    plan_chunks,
    plan_prompt,
)
from pc_rag.pml import Import, Module, RoleBlock, Text
from pc_rag.pml.nodes import Parameter, Scaffold, Turn
from pc_rag.types import HitKind, ModuleKey, PositionPolicy, Span, Visibility
from tests.support.char_encoder import CharEncoder, decode
from tests.support.pml_strategies import (
    ARGUMENT_LETTERS,
    DEFAULT_LETTERS,
    PROMPT_LETTERS,
    SCHEMA_LETTERS,
    schemas,
    schemas_with_prompts,
    with_paths,
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


def schema_text(children, imports, arguments):
    """What a prompt with these imports reads of a schema: text, arguments, imported modules."""
    imported = {node.name: node for node in imports_in(imports)}
    found = ""
    for child in children:
        match child:
            case Text(text=text):
                found += text
            case Parameter():
                text = arguments.get(child.name, child.default)
                found += text.ljust(child.max_tokens) if child.pads_with_space else text
            case RoleBlock(children=inner):
                found += schema_text(inner, imports, arguments)
            case Scaffold(name=name, members=members) if name in imported:
                inner = {node.name: node for node in imports_in(imported[name].children)}
                for member in members:
                    node = inner.get(member.name, Import(member.name))
                    found += schema_text(member.children, node.children, node.arguments)
            case _:
                members = (child,) if isinstance(child, Module) else child.members
                for member in members:
                    if member.name in imported:
                        node = imported[member.name]
                        found += schema_text(member.children, node.children, node.arguments)
    return found


def imports_in(children):
    for child in children:
        if isinstance(child, Import):
            yield child
        elif isinstance(child, Turn):
            yield from imports_in(child.children)


def prompt_text(children):
    return "".join(
        child.text if isinstance(child, Text) else prompt_text(child.children) for child in children
    )


def has_parameter(nodes):
    return any(
        isinstance(node, Parameter)
        or has_parameter(getattr(node, "children", ()) + getattr(node, "members", ()))
        for node in nodes
    )


def check_items(items, start):
    """Items follow each other without gap or overlap; returns where they end."""
    for item in items:
        assert item.span.start == start
        if isinstance(item, ModuleLayout):
            assert check_items(item.items, start) == item.span.end
        elif isinstance(item, ScaffoldLayout):
            assert check_items(item.members, start) == item.span.end
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
    """Every run is an item exactly once, or the joint run of a scaffold, behind its members'."""

    def indexes(items):
        for item in items:
            if isinstance(item, RunItem):
                yield item.index
            elif isinstance(item, ModuleLayout):
                yield from indexes(item.items)
            else:
                for member in item.members:
                    yield from indexes(member.items)
                if isinstance(item, ScaffoldLayout) and item.joint_index is not None:
                    yield item.joint_index

    layout = laid_out(schema)
    assert list(indexes(layout.items)) == list(range(len(layout.runs)))


@settings(deadline=None)
@given(schemas(), visibilities)
def test_rows_agree_when_a_scaffold_is_stored_jointly(schema, visibility):
    """A member's rows of the joint run are its own: tokens, parameters, and what comes first."""
    layout = laid_out(schema, visibility)
    for scaffold in scaffolds_in(layout.items):
        runs = [layout.runs[i.index] for member in scaffold.members for i in member.items]
        assert (scaffold.joint_index is None) is not (runs and all(r.is_stored for r in runs))
        if scaffold.joint_index is None:
            continue
        joint = layout.runs[scaffold.joint_index]
        assert joint.span == scaffold.span
        assert joint.context == runs[0].context
        parameters = iter(joint.parameters)
        for run in runs:
            row = run.span.start - joint.span.start
            assert joint.token_ids[row : row + len(run.span)] == run.token_ids
            for mine, theirs in zip(run.parameters, parameters, strict=False):
                assert mine.parameter is theirs.parameter
                assert theirs.rows == Span(mine.rows.start + row, mine.rows.end + row)


def scaffolds_in(items):
    for item in items:
        if isinstance(item, ScaffoldLayout):
            yield item
        elif isinstance(item, ModuleLayout):
            yield from scaffolds_in(item.items)
        elif isinstance(item, UnionLayout):
            for member in item.members:
                yield from scaffolds_in(member.items)


@settings(deadline=None)
@given(schemas(), visibilities)
def test_nothing_unstored_is_attended_when_a_run_is_stored(schema, visibility):
    """What is computed in every request leaves no trace in what is kept."""
    layout = laid_out(schema, visibility)
    for run in layout.runs:
        assert not run.is_stored or all(layout.runs[i].is_stored for i in run.context)


@settings(deadline=None)
@given(schemas())
def test_rows_add_up_when_a_layout_is_listed(schema):
    """A node counts the entries and tokens of what it holds; a scaffold its joint entry besides."""
    rows = layout_rows(laid_out(schema))
    for index, row in enumerate(rows):
        inner = takewhile(lambda each, row=row: each.depth > row.depth, rows[index + 1 :])
        below = [each for each in inner if each.depth == row.depth + 1]
        if row.kind is RowKind.TEXT:
            assert row.num_entries <= 1
            assert sum(each.num_tokens for each in below) <= max(row.num_tokens, 0)
            continue
        own = row.num_entries - sum(each.num_entries for each in below)
        assert own in ((0, 1) if row.kind is RowKind.SCAFFOLD else (0,))
        assert row.kind in (RowKind.SCAFFOLD, RowKind.PARAMETER) or row.num_tokens == sum(
            each.num_tokens for each in below
        )


@settings(deadline=None)
@given(schemas_with_prompts(), policies)
def test_no_text_is_lost_when_a_prompt_is_planned(pair, policy):
    """The ids are those of the schema's text and arguments and of the prompt's, each in order."""
    schema, prompt = pair
    text = decode(planned(schema, prompt, policy).token_ids)
    body = text.replace("<generate>", "")
    for tag in ("bos", "system", "user", "assistant"):
        body = body.replace(f"<{tag}>", "").replace(f"</{tag}>", "")
    letters = SCHEMA_LETTERS + DEFAULT_LETTERS + ARGUMENT_LETTERS + " "
    assert only(letters, body) == schema_text(schema.children, prompt.children, prompt.arguments)
    assert only(PROMPT_LETTERS, body) == prompt_text(prompt.children)
    assert len(body) == len(only(letters + PROMPT_LETTERS, body)), "a placeholder is read"
    assert text.count("<bos>") == 1
    assert text.startswith("<bos>")


@settings(deadline=None)
@given(schemas_with_prompts(), policies)
def test_plan_is_the_same_when_imports_are_paths(pair, policy):
    """``<a.b/>`` is ``<a><b/></a>``, at any depth and in turns."""
    schema, prompt = pair
    assert planned(schema, with_paths(prompt), policy) == planned(schema, prompt, policy)


@settings(deadline=None)
@given(schemas_with_prompts(), policies, visibilities)
def test_rows_behind_a_parameter_keep_their_distance_when_it_has_an_argument(
    pair, policy, visibility
):
    """All parts of one use of an entry lie as far from each other as they were encoded."""
    layout = laid_out(pair[0], visibility)
    for part in planned(*pair, policy, visibility).parts:
        if part.occurrence is None or part.label == "":
            continue
        run = layout.runs[int(part.occurrence.key)]
        row = part.span.start - part.occurrence.start
        reserved = [p.rows for p in run.parameters if p.rows.start == row]
        if isinstance(part, Fresh) and part.kind is FreshKind.ARGUMENT:
            assert len(part.token_ids) <= len(reserved[0])
        else:
            assert part.token_ids == run.token_ids[row : row + len(part.token_ids)]
            assert not reserved, "a placeholder is read"


@settings(deadline=None)
@given(schemas_with_prompts(), visibilities)
def test_policies_agree_when_they_plan_the_same_prompt(pair, visibility):
    """Policies move spans; tokens and their order stay, and reserved never starts earlier."""
    packed, reserved = (planned(*pair, policy, visibility) for policy in PositionPolicy)
    assert packed.token_ids == reserved.token_ids
    assert packed.position_ids == tuple(sorted(set(packed.position_ids)))
    if not has_parameter(pair[0].children):
        assert packed.position_ids == tuple(range(packed.num_tokens))
    assert all(p <= r for p, r in zip(packed.position_ids, reserved.position_ids, strict=True))
    assert reserved.position_ids == tuple(sorted(set(reserved.position_ids)))


@settings(deadline=None)
@given(schemas_with_prompts(), policies, visibilities)
def test_exact_hits_lead_a_plan_when_there_are_any(pair, policy, visibility):
    """An exact part is unmoved, and all before it is exact and is what its run attended."""
    layout = laid_out(pair[0], visibility)
    plan = planned(*pair, policy, visibility)
    seen, num_exact, end = [], 0, 0
    for part in plan.parts:
        if isinstance(part, Fresh) or part.hit_kind is not HitKind.EXACT:
            break
        index = int(part.key)
        assert part.shift == 0
        num_exact += 1
        if seen[-1:] == [index]:
            assert part.rows.start == end
        else:
            assert part.rows.start == 0
            assert layout.runs[index].context == tuple(seen)
            seen.append(index)
        end = part.rows.end
    assert all(part.hit_kind is not HitKind.EXACT for part in plan.cached[num_exact:])


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
    assert all(
        not before.kind is behind.kind is FreshKind.UNCACHED
        or (before.label, before.occurrence) != (behind.label, behind.occurrence)
        or before.span.end < behind.span.start
        for before, behind in pairwise(uncached.parts)
    ), "what was one piece is one again"
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
