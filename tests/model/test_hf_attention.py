"""Our attention is in place during a forward pass, and only then."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from pc_rag.errors import ModelError
from pc_rag.model.attention.kv_view import KVView
from pc_rag.model.attention_modules import carry
from pc_rag.model.buffer_pool import BufferPool
from pc_rag.model.detection.detect import runner_of
from pc_rag.model.hf_attention import _attention, own_attention
from pc_rag.model.positions import Absent, uniform
from pc_rag.model.runner import Runner
from tests.support.attention_models import INTERFACED, NEWLY_INTERFACED, build
from tests.support.dense_pass import DensePass
from tests.support.other_thread import errors_of_the_owner
from tests.support.tiny_models import FAMILIES, tiny_model

IDS = torch.tensor([[10, 20, 30, 40]])
CLOSE = {"atol": 1e-4, "rtol": 0.0}
ANY_PASS = DensePass(uniform(Absent(), 3))
"""Nothing attends through it."""


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_of_the_owner_comes_back(implementation):
    """Whatever was set before is set afterwards, and used."""
    model, _ = tiny_model("llama")
    model.set_attn_implementation(implementation)
    with own_attention(model, ANY_PASS):
        assert model.config._attn_implementation == "pc_rag"
    assert model.config._attn_implementation == implementation


def test_attention_of_the_owner_comes_back_when_the_pass_raises():
    """Also on an error inside."""
    model, _ = tiny_model("llama")
    before = model.config._attn_implementation

    def fail():
        with own_attention(model, ANY_PASS):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", FAMILIES)
def test_owner_calls_the_model_between_passes(family):
    """Logits and generated tokens of the owner are those from before."""
    model, _ = tiny_model(family)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    logits, tokens = model(IDS).logits, model.generate(IDS, **options)
    runner = runner_of(model)
    runner.prefill(KVView((), runner.pool.take(4)), (1, 2, 3), (0, 5, 9))
    assert torch.equal(model(IDS).logits, logits)
    assert torch.equal(model.generate(IDS, **options), tokens)


def test_owner_is_told_when_another_thread_calls_the_model_during_a_pass():
    """An error with advice, not a wrong answer; the running pass has not heard of it."""
    model, _ = tiny_model("llama")
    errors = errors_of_the_owner(model, IDS, ANY_PASS)
    assert len(errors) == 1
    assert "serialise the calls" in errors[0]
    assert ANY_PASS.num_layers_served == 0


@torch.no_grad()
@pytest.mark.parametrize("name", [*INTERFACED, *NEWLY_INTERFACED])
def test_logits_are_those_of_stock_attention(name):
    """What a layer hands on is all it takes: capping, sinks, scaling, values of another size.

    Anywhere in the context: position IDs are the request's, never counted from a mask.
    """
    spec = (INTERFACED | NEWLY_INTERFACED)[name]
    model = build(spec)
    if any(hasattr(module, "_attn") for module in model.modules()):
        pytest.skip("this version of transformers has it attend by itself")
    runner = Runner(model, spec.positions, spec.shape, pool_bytes=0)
    token_ids = torch.tensor([[5, 17, 3, 80, 41, 9, 66], [12, 7, 55, 5, 31, 90, 8]])
    for start in (0, 20):
        position_ids = torch.arange(start, start + 7)[None]
        expected = model(token_ids, position_ids=position_ids.expand(2, -1)).logits
        running = DensePass(spec.positions)
        kept = torch.tensor([2, 6])
        logits = runner.run_pass(running, token_ids, position_ids, logits_behind=kept)
        torch.testing.assert_close(logits, expected[:, kept], **CLOSE)
        assert running.keys[0].shape[1] == spec.num_kv_heads
        without_logits = DensePass(spec.positions)
        runner.run_pass(without_logits, token_ids, position_ids, logits_behind=None)
        assert torch.equal(without_logits.keys[1], running.keys[1])


def test_attention_mask_is_refused():
    """It would silently be left out."""
    states = torch.zeros(1, 1, 1, 8)
    with (
        carry(ANY_PASS),
        pytest.raises(ModelError, match=r"asks for an attention mask \(1 x 1 x 2 x 2\)"),
    ):
        _attention(torch.nn.Linear(1, 1), states, states, states, torch.ones(1, 1, 2, 2))


def test_passes_take_turns_when_threads_share_a_runner():
    """One lock: the carrier of one pass never meets the layers of another."""
    model, _ = tiny_model("llama")
    runner = runner_of(model)
    expected = {i: model(torch.tensor([[i, 2, i]])).logits[0, -1] for i in range(6)}
    wrong = []

    def run(i):
        for _ in range(5):
            view = KVView((), runner.pool.take(3))
            logits = runner.prefill(view, (i, 2, i), range(3))
            if not torch.allclose(logits, expected[i], atol=1e-4):
                wrong.append(i)
            runner.pool.give_back(view.tail)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert isinstance(runner.pool, BufferPool)


def test_model_is_run_by_one_at_a_time_when_several_runners_share_it():
    """A second pass waits until the first has put the model's own attention back."""
    model, _ = tiny_model("llama")
    has_entered = threading.Event()

    def enter():
        with own_attention(model, ANY_PASS):
            has_entered.set()

    thread = threading.Thread(target=enter)
    with own_attention(model, ANY_PASS):
        thread.start()
        assert not has_entered.wait(0.2)
    assert has_entered.wait(10)
    thread.join(10)
    assert model.config._attn_implementation == "sdpa"


def test_pass_is_refused_when_a_layer_attends_by_itself():
    """Its KV would be missing from the buffer, and whatever lay there would be stored."""
    model, _ = tiny_model("llama")
    runner = runner_of(model)
    stray = model.model.layers[1].self_attn
    stray.config = copy.copy(model.config)
    stray.config._attn_implementation = "sdpa"
    tail = runner.pool.take(4)
    with pytest.raises(ModelError, match="2 of 3 layers attended"):
        runner.prefill(KVView((), tail), (1, 2, 3), range(3))
    assert tail.num_rows == 0
