"""E4 in a corpus: a scaffold's entry equals joint prefill, and requests that read it are right."""

from __future__ import annotations

import pytest
import torch

from pc_rag.corpus import PromptFormat
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.types import HitKind, PositionPolicy, Visibility
from tests.support.corpora import CAT, DOG, FISH, TEXTS, loaded_model, opened
from tests.support.reference import Module, assembled_logits, full_logits, masked_logits, module_kv
from tests.support.tiny_models import FAMILIES

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
ELSE = "And elsewhere"


def ids_of(corpus, *texts):
    """The ids of chunks, by their texts."""
    known = {text: chunk_id for chunk_id, text in corpus._catalog.live_texts()}
    return [known[text] for text in texts]


def prompt_of(corpus, *texts, before="", between=None, question="Who sat?"):
    """A question about texts, as the corpus would put it."""
    separator = corpus.prompt_format.separator if between is None else between
    return corpus.prompt_format.messages(question, [before + separator.join(texts)])


def logits_of(engine, request):
    """Logits behind a request, by the engine's own source and runner."""
    plan = request.plan
    with engine.source.acquire([part.key for part in plan.cached], request.recipes) as acquired:
        view = assemble(plan, acquired.entries, engine.runner, num_new_tokens=1)
        return engine.runner.prefill(view, *fresh_tokens(plan))


def modules_of(request):
    """How the reference must see the entries of a request."""
    modules = {}
    for key, recipe in request.recipes.items():
        context = [request.recipes[each].address for each in recipe.context]
        modules[key] = Module(
            recipe.address.token_ids,
            recipe.address.start,
            tuple(i for address in context for i in address.token_ids),
            tuple(i for a in context for i in range(a.span.start, a.span.end)),
        )
    return modules


def own_parts(request):
    return [part for part in request.plan.cached if part.label != "(prefix)"]


@pytest.mark.parametrize("visibility", [Visibility.PREFIX, Visibility.MODULE])
@pytest.mark.parametrize("family", FAMILIES)
def test_e4_entry_of_a_scaffold_equals_joint_prefill_of_its_chunks(family, visibility):
    """E4: the KV of chunks and separators in one stock forward pass, behind what they attend."""
    with opened(loaded=loaded_model(family), visibility=visibility) as corpus:
        corpus.add(TEXTS)
        engine = corpus.engine
        corpus.scaffold(ids_of(corpus, CAT, DOG, FISH))
        request = corpus.plan(prompt_of(corpus, CAT, DOG, FISH))
        (key,) = {part.key for part in own_parts(request)}
        recipe = request.recipes[key]
        joint = corpus.prompt_format.separator.join((CAT, DOG, FISH))
        assert recipe.address.token_ids == engine.loaded.tokenizer.encode_text(joint)
        keys, values = module_kv(engine.loaded.model, modules_of(request)[key])
        with engine.store.lease(recipe.address, engine.runner.device) as lease:
            torch.testing.assert_close(lease.entry.keys, torch.stack(keys), **TOLERANCE)
            torch.testing.assert_close(lease.entry.values, torch.stack(values), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("separator", ["\n\n", "", " -- "])
def test_e4_prefix_scaffold_question_equals_full_prefill(family, separator):
    """E4: every hit is exact and the logits are full prefill's; those of single entries are not."""
    prompt_format = PromptFormat(separator=separator)
    with opened(loaded=loaded_model(family), prompt_format=prompt_format) as corpus:
        corpus.add(TEXTS)
        prompt = prompt_of(corpus, CAT, DOG)
        single = corpus.plan(prompt)
        corpus.scaffold(ids_of(corpus, CAT, DOG))
        request = corpus.plan(prompt)
        assert [part.hit_kind for part in request.plan.cached] == [HitKind.EXACT] * 3
        assert request.plan.token_ids == single.plan.token_ids
        plan = request.plan
        expected = full_logits(corpus.engine.loaded.model, plan.token_ids, plan.position_ids)
        torch.testing.assert_close(logits_of(corpus.engine, request), expected, **TOLERANCE)
        assert (logits_of(corpus.engine, single) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repair": "link:4"},
        {"position_policy": PositionPolicy.RESERVED, "slot_tokens": 80},
        {"visibility": Visibility.MODULE},
    ],
    ids=["packed", "link", "reserved", "module"],
)
@pytest.mark.parametrize("between", ["\n\n", " | "])
@pytest.mark.parametrize("before", [f"{FISH}\n\n", ELSE])
def test_e4_moved_scaffolds_equal_the_reference(settings, between, before):
    """E2 and E4: behind a chunk or text, together or apart, the oracle's logits."""
    with opened(**settings) as corpus:
        corpus.add(TEXTS)
        corpus.scaffold(ids_of(corpus, CAT, DOG))
        request = corpus.plan(prompt_of(corpus, CAT, DOG, before=before, between=between))
        cat, dog = own_parts(request)[-2:]
        assert cat.key == dog.key
        assert (cat.hit_kind, dog.hit_kind) == (HitKind.COMPOSED, HitKind.COMPOSED)
        model, plan = corpus.engine.loaded.model, request.plan
        expected = assembled_logits(model, plan, modules_of(request))
        torch.testing.assert_close(logits_of(corpus.engine, request), expected, **TOLERANCE)


def test_e4_scaffold_under_module_visibility_equals_one_masked_forward_pass():
    """E2 by the other oracle: a scaffold that saw itself only, moved as a whole."""
    with opened(visibility=Visibility.MODULE) as corpus:
        corpus.add(TEXTS)
        corpus.scaffold(ids_of(corpus, CAT, DOG))
        request = corpus.plan(prompt_of(corpus, FISH, CAT, DOG))
        expected = masked_logits(corpus.engine.loaded.model, request.plan, modules_of(request))
        torch.testing.assert_close(logits_of(corpus.engine, request), expected, **TOLERANCE)
