"""Who the siblings of a run are, and which runs a path names."""

from __future__ import annotations

import pytest

from pc_rag.config import EngineConfig
from pc_rag.engine.siblings import runs_of, sibling_runs
from pc_rag.errors import PromptError
from pc_rag.layout import lay_out
from pc_rag.pml import parse_prompt, parse_schema
from pc_rag.types import Visibility
from tests.support.char_encoder import CharEncoder, decode
from tests.support.engines import tiny_engine
from tests.support.kv import numbered_entry

NESTED = """
<schema name="s">Read.
  <union>
    <module name="sea">The sea.
      <union><module name="north">N</module><module name="south">S</module></union>
      Swim.
    </module>
    <module name="hills">Hills.</module>
  </union>
  <module name="food">Eat.<module name="fish">Fish.</module></module>
</schema>
"""


@pytest.fixture
def layout():
    return lay_out(parse_schema(NESTED), CharEncoder(has_bos=False), visibility=Visibility.PREFIX)


WHOLE = """
<schema name="s">
  <union>
    <module name="plain">Plain.</module>
    <module name="fresh" cache="false">Fresh.</module>
    <module name="asked"><param name="p" len="9"/></module>
    <module name="both">
      <scaffold name="pair">
        <module name="left">Left.</module><module name="right">Right.</module>
      </scaffold>
    </module>
  </union>
</schema>
"""


def texts_of(layout, indexes):
    return [decode(layout.runs[index].token_ids).strip() for index in indexes]


def test_siblings_are_the_runs_of_the_other_members_when_unions_are_nested(layout):
    """Those of the inner union first, all runs of a member, none outside of unions."""
    found = {
        *(
            (*texts_of(layout, [index]), tuple(texts_of(layout, others)))
            for index, others in sibling_runs(layout).items()
        )
    }
    assert found == {
        ("The sea.", ("Hills.",)),
        ("N", ("S", "Hills.")),
        ("S", ("N", "Hills.")),
        ("Swim.", ("Hills.",)),
        ("Hills.", ("The sea.", "N", "S", "Swim.")),
    }


def test_only_runs_with_entries_are_siblings_when_members_are_not_stored():
    """Not what is computed in every request, nor what holds only a parameter; joint runs are."""
    layout = lay_out(parse_schema(WHOLE), CharEncoder(has_bos=False), visibility=Visibility.PREFIX)
    found = sibling_runs(layout)
    (plain,) = runs_of(layout, ["plain"])
    assert texts_of(layout, found[plain]) == ["Left.", "Right.", "Left.Right."]
    assert {others for index, others in found.items() if index != plain} == {(plain,)}
    assert texts_of(layout, runs_of(layout, ["both.pair"])) == ["Left.", "Right.", "Left.Right."]
    assert texts_of(layout, runs_of(layout, ["both.left"])) == ["Left."]
    assert runs_of(layout, ["fresh", "asked"]) == []
    assert runs_of(layout, None) == [plain, *found[plain]]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (None, ["Read.", "The sea.", "N", "S", "Swim.", "Hills.", "Eat.", "Fish."]),
        ([], []),
        (["hills"], ["Read.", "Hills."]),
        (["sea.south"], ["Read.", "The sea.", "S"]),
        ({"food", "hills"}, ["Read.", "Hills.", "Eat.", "Fish."]),
    ],
)
def test_modules_come_with_what_they_hold_and_attend_when_paths_name_them(layout, paths, expected):
    """In the order of the schema; siblings only where they are named."""
    assert texts_of(layout, runs_of(layout, paths)) == expected


def test_every_unknown_path_is_named_when_paths_are_refused(layout):
    """With the nearest path there is, or with those there are."""
    with pytest.raises(PromptError) as caught:
        runs_of(layout, ["food", "sea.noth", 7])
    assert str(caught.value).splitlines() == [
        "schema 's' has no module 'sea.noth'; did you mean 'sea.north'?",
        "schema 's' has no module 7; it has sea, sea.north, sea.south, hills, food, food.fish",
    ]


@pytest.mark.parametrize(("paths", "what"), [("food", "text"), (7, "int")])
def test_single_path_is_refused_when_a_list_is_wanted(layout, paths, what):
    """Each character would be a path."""
    with pytest.raises(PromptError, match=f"single {what} for paths; pass a list"):
        runs_of(layout, paths)


def test_entry_is_no_sibling_of_itself_when_members_share_it():
    """Members of one text at one place are one entry."""
    engine = tiny_engine()
    engine.add_schema(
        '<schema name="s"><union><module name="a">same</module><module name="b">same</module>'
        '<module name="c">other</module></union></schema>'
    )
    request = engine.plan(parse_prompt('<prompt schema="s"><a/>?</prompt>'))
    same, other = request.recipes.values()
    assert (same.siblings, other.siblings) == ((other.address.key,), (same.address.key,))


TWO_UNIONS = """
<schema name="s">
  <union><module name="a1">{}</module><module name="a2">{}</module></union>
  <union><module name="b1">{}</module><module name="b2">{}</module></union>
</schema>
""".format(*("abcd"[i] * 40 for i in range(4)))


@pytest.mark.parametrize(("keeps_siblings", "kept"), [(True, ["a1", "a2"]), (False, ["a1", "b2"])])
def test_members_of_a_used_union_stay_together_when_others_need_room(keeps_siblings, kept):
    """Those of the other union go first, though they were stored later."""
    bytes_per_token = tiny_engine().bytes_per_token
    config = EngineConfig(
        prefix_cache_bytes=0, keep_siblings=keeps_siblings, memory_bytes=160 * bytes_per_token
    )
    engine = tiny_engine(config=config)
    engine.add_schema(TWO_UNIONS)
    request = engine.plan(parse_prompt('<prompt schema="s"><a1/>Go</prompt>'))
    engine.generate(request)
    for number in range(2):
        num_tokens = 40 * bytes_per_token // numbered_entry(0, num_tokens=1).num_bytes
        engine.store.put(numbered_entry(number, num_tokens=num_tokens))
    names = dict(zip(["a1", "a2", "b1", "b2"], request.recipes.values(), strict=True))
    stored = [n for n, recipe in names.items() if engine.store.lookup(recipe.address).is_hit]
    assert stored == kept


def test_used_members_stay_longest_when_siblings_are_kept():
    """A use of several unions leaves what was read behind all that was not."""
    bytes_per_token = tiny_engine().bytes_per_token
    config = EngineConfig(
        prefix_cache_bytes=0, keep_siblings=True, memory_bytes=160 * bytes_per_token
    )
    engine = tiny_engine(config=config)
    engine.add_schema(TWO_UNIONS)
    request = engine.plan(parse_prompt('<prompt schema="s"><a1/><b1/>Go</prompt>'))
    engine.generate(request)
    num_tokens = 80 * bytes_per_token // numbered_entry(0, num_tokens=1).num_bytes
    engine.store.put(numbered_entry(0, num_tokens=num_tokens))
    used = {part.key for part in request.plan.cached}
    stored = {
        key for key, each in request.recipes.items() if engine.store.lookup(each.address).is_hit
    }
    assert stored == used
