"""Our attention is in place during a forward pass, and only then."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from pc_rag.errors import ModelError
from pc_rag.model.buffer_pool import BufferPool
from pc_rag.model.detect import runner_of
from pc_rag.model.hf_attention import _attention, own_attention
from pc_rag.model.kv_view import KVView
from tests.support.tiny_models import FAMILIES, tiny_model

IDS = torch.tensor([[10, 20, 30, 40]])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_of_the_owner_comes_back(implementation):
    """Whatever was set before is set afterwards, and used."""
    model, _ = tiny_model("llama")
    model.set_attn_implementation(implementation)
    with own_attention(model):
        assert model.config._attn_implementation == "pc_rag"
    assert model.config._attn_implementation == implementation


def test_attention_of_the_owner_comes_back_when_the_pass_raises():
    """Also on an error inside."""
    model, _ = tiny_model("llama")
    before = model.config._attn_implementation

    def fail():
        with own_attention(model):
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


def test_owner_is_told_when_it_calls_the_model_during_a_pass():
    """A call from another thread meanwhile is an error with advice, not a wrong answer."""
    model, _ = tiny_model("llama")
    with own_attention(model), pytest.raises(ModelError, match="serialise the calls"):
        model(IDS)


@pytest.mark.parametrize(
    "asked", [{"mask": torch.ones(1)}, {"softcap": 30.0}, {"s_aux": torch.zeros(1)}]
)
def test_attention_that_is_not_ours_is_refused(asked):
    """A mask, soft-capping and sinks would silently be left out."""
    states = torch.zeros(1, 1, 1, 8)
    mask = asked.pop("mask", None)
    with pytest.raises(ModelError, match="mask, soft-capping or sinks"):
        _attention(torch.nn.Linear(1, 1), states, states, states, mask, **asked, **{CARRIER: 1})


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
        with own_attention(model):
            has_entered.set()

    thread = threading.Thread(target=enter)
    with own_attention(model):
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
