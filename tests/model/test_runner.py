"""Forward passes: logits, batches, room, and errors."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from pc_rag.errors import GenerationError, ModelError
from pc_rag.layout.plan import Fresh, RequestPlan
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.attention.kv_view import KVView
from pc_rag.model.buffer_pool import KVShape
from pc_rag.model.detection.detect import runner_of
from pc_rag.types import Span
from tests.support.requests import Workbench, cached
from tests.support.tiny_models import FAMILIES, tiny_model

CLOSE = {"atol": 1e-4, "rtol": 0.0}


def tiny_runner(family="llama", **options):
    model, _ = tiny_model(family, **options)
    return runner_of(model)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", KVShape(3, 2, 16, 16)),
        ("llama-mha", KVShape(3, 4, 16, 16)),
        ("llama-head-dim", KVShape(3, 2, 32, 32)),
        ("gpt_neox", KVShape(3, 4, 16, 16)),
    ],
)
def test_geometry_is_that_of_the_models_own_cache(family, shape):
    """Sized by key/value heads and head size."""
    model, _ = tiny_model(family)
    assert runner_of(model).shape == shape
    cache = model(torch.tensor([[1, 2]]), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (1, shape.num_kv_heads, 2, shape.key_dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_decode_equals_one_forward_pass(family):
    """Logits behind every token are those of stock attention; float32, of the vocabulary's size."""
    runner = tiny_runner(family)
    ids = list(range(30, 50))
    expected = runner._model(torch.tensor([ids])).logits[0].float()
    view = KVView((), runner.pool.take(20))
    logits = runner.prefill(view, ids[:15], range(15))
    torch.testing.assert_close(logits, expected[14], **CLOSE)
    assert logits.shape == (300,)
    assert logits.dtype is torch.float32
    for position in range(15, 20):
        logits = runner.decode(view, ids[position], position)
        torch.testing.assert_close(logits, expected[position], **CLOSE)
    assert view.tail.num_rows == 20


def test_prefill_in_pieces_equals_prefill_at_once():
    """Several tokens behind several computed ones."""
    runner = tiny_runner()
    ids = list(range(30, 50))
    whole = runner.prefill(KVView((), runner.pool.take(20)), ids, range(20))
    view = KVView((), runner.pool.take(20))
    for start in (0, 7, 8):
        end = {0: 7, 7: 8, 8: 20}[start]
        logits = runner.prefill(view, ids[start:end], range(start, end))
    torch.testing.assert_close(logits, whole, **CLOSE)


def test_bfloat16_logits_are_near_those_of_float32():
    """Tolerance: 5 % of the largest logit, over stored, moved and fresh tokens."""
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        bench = Workbench(tiny_model("llama", dtype=dtype)[0])
        entries = [bench.encode(tuple(range(s, s + 20)), start=0) for s in (40, 90)]
        plan = RequestPlan(
            (
                cached(entries[0], start=0),
                cached(entries[1], start=20),
                Fresh(token_ids=(1, 2, 3), span=Span(40, 43)),
            )
        )
        logits += [bench.logits(plan), bench.logits(plan, settle=True)]
    exact, settled, low, low_settled = logits
    torch.testing.assert_close(exact, settled, **CLOSE)
    tolerance = 0.05 * float(exact.abs().max())
    torch.testing.assert_close(low, exact, atol=tolerance, rtol=0)
    torch.testing.assert_close(low_settled, low, atol=tolerance, rtol=0)


@pytest.mark.parametrize("num_decoded", [0, 1, 6])
def test_settling_keeps_logits_at_any_time(num_decoded):
    """Settled after the prefill or later, every further token has the same logits."""
    bench = Workbench(tiny_model("qwen3")[0])
    entries = [bench.encode(tuple(range(s, s + 20)), start=0) for s in (40, 90)]
    plan = RequestPlan(
        (
            cached(entries[0], start=0),
            Fresh(token_ids=(5, 6), span=Span(20, 22)),
            cached(entries[1], start=25),
            Fresh(token_ids=(1, 2, 3), span=Span(45, 48)),
        )
    )
    runs = []
    for settle_at in (None, num_decoded):
        view = assemble(plan, bench.entries, bench.runner, num_new_tokens=10)
        bench.runner.prefill(view, *fresh_tokens(plan))
        logits = []
        for step in range(8):
            if step == settle_at:
                bench.runner.settle(view, 10)
            logits.append(bench.runner.decode(view, 60 + step, 48 + step))
        runs.append(torch.stack(logits))
    torch.testing.assert_close(*runs, **CLOSE)


def test_settling_gives_the_former_buffer_back():
    """The pool has one buffer to lend again."""
    bench = Workbench(tiny_model("llama")[0])
    entry = bench.encode(tuple(range(300))[:256], start=0)
    plan = RequestPlan((cached(entry, start=0), Fresh(token_ids=(1,), span=Span(256, 257))))
    view = assemble(plan, bench.entries, bench.runner, num_new_tokens=1)
    bench.runner.prefill(view, *fresh_tokens(plan))
    former = view.tail
    bench.runner.settle(view, 10)
    assert view.tail is not former
    assert bench.runner.pool.take(2).keys.data_ptr() == former.keys.data_ptr()
    view.tail.reserve(10)


def test_pass_without_tokens_is_refused():
    """There is nothing to take logits from."""
    runner = tiny_runner()
    with pytest.raises(GenerationError, match="at least one fresh token"):
        runner.prefill(KVView((), runner.pool.take(4)), (), ())


def test_pass_that_does_not_fit_the_buffer_is_refused_before_it_runs():
    """No row is written."""
    runner = tiny_runner()
    view = KVView((), runner.pool.take(4))
    view.tail.num_rows = view.tail.capacity - 1
    with pytest.raises(GenerationError, match="2 more were asked for"):
        runner.prefill(view, (1, 2), (0, 1))


def test_rows_are_not_counted_when_the_model_raises():
    """A failed pass can be tried again: the view holds what it held."""
    runner = tiny_runner()
    view = KVView((), runner.pool.take(8))
    expected = runner.prefill(KVView((), runner.pool.take(8)), (1, 2, 3), range(3))
    runner.prefill(view, (1, 2), range(2))

    def fail(*_):
        raise ZeroDivisionError

    handle = runner._model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        runner.decode(view, 3, 2)
    handle.remove()
    assert view.tail.num_rows == 2
    torch.testing.assert_close(runner.decode(view, 3, 2), expected, **CLOSE)


def test_compute_fills_every_sequence_of_a_batch():
    """KV of a batch equals that of its sequences alone."""
    runner = tiny_runner()
    batch = torch.tensor([[1, 2, 3], [7, 8, 9]])
    tail = runner.pool.take(3, batch_size=2)
    runner.compute(KVView((), tail), batch, range(4, 7))
    assert tail.num_rows == 3
    for row in range(2):
        alone = runner.pool.take(3)
        runner.compute(KVView((), alone), batch[row : row + 1], range(4, 7))
        torch.testing.assert_close(
            tail.keys[:, row, :, :3], alone.keys[:, 0, :, :3], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            tail.values[:, row, :, :3], alone.values[:, 0, :, :3], atol=1e-5, rtol=1e-5
        )


class CapsItsLogits(LlamaForCausalLM):
    """Takes no ``logits_to_keep``, and changes what its head gives."""

    def forward(self, input_ids, position_ids, **kwargs):
        hidden = self.model(input_ids, position_ids=position_ids, **kwargs)[0]
        return CausalLMOutput(logits=3 * torch.tanh(self.lm_head(hidden) / 3))


class MultipliesByItsHead(LlamaForCausalLM):
    """Does not call its head."""

    def forward(self, input_ids, position_ids, **kwargs):
        hidden = self.model(input_ids, position_ids=position_ids, **kwargs)[0]
        return CausalLMOutput(logits=hidden @ self.lm_head.weight.T)


def test_head_is_given_the_wanted_rows_only_when_the_model_takes_no_logits_to_keep():
    """What the model does to logits afterwards it does to these; no hook stays behind."""
    model, _ = tiny_model("llama")
    model.__class__ = CapsItsLogits
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids, torch.arange(4)[None]).logits[0, -1]
    rows = []
    handle = model.lm_head.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[1]))
    runner = runner_of(model)
    logits = runner.prefill(KVView((), runner.pool.take(4)), (5, 6, 7, 8), range(4))
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert rows == [1]
    handle.remove()
    assert not model.lm_head._forward_pre_hooks


def test_pass_is_refused_when_the_wanted_logits_cannot_be_told_from_the_others():
    """Logits behind another token would be a wrong answer."""
    model, _ = tiny_model("llama")
    model.__class__ = MultipliesByItsHead
    runner = runner_of(model)
    with pytest.raises(ModelError, match="4 rows of logits where 1 were asked for"):
        runner.prefill(KVView((), runner.pool.take(4)), (5, 6, 7, 8), range(4))
