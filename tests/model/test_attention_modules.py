"""Architectures that do not call transformers' attention interface attend through pc-rag."""

from __future__ import annotations

import threading
from importlib import import_module

import pytest
import torch

from pc_rag.errors import ModelError
from pc_rag.model.attention_modules import own_attention_of
from pc_rag.model.runner import Runner
from tests.support.attention_models import FOREIGN, HEAD_DIM, build
from tests.support.dense_pass import DensePass
from tests.support.other_thread import errors_of_the_owner

ARCHITECTURES = ("bloom", "mpt", "falcon", "gpt_neo", "xglm")
CLOSE = {"atol": 1e-4, "rtol": 0.0}
IDS = torch.tensor([[5, 17, 3, 80, 41, 9, 66, 23], [12, 7, 55, 5, 31, 90, 8, 44]])


def run(model, spec, ids=IDS, *, start=0, kept=None):
    """Logits of a pass over ``ids`` alone, and the pass."""
    running = DensePass(spec.positions)
    logits = Runner(model, spec.positions, spec.shape, pool_bytes=0).run_pass(
        running,
        ids,
        torch.arange(start, start + ids.shape[1])[None],
        logits_behind=torch.arange(ids.shape[1]) if kept is None else kept,
    )
    return logits, running


def attention_modules(model):
    """The modules that get another forward."""
    own = own_attention_of(model)
    return [
        module
        for module in model.modules()
        if f"{type(module).__module__}.{type(module).__name__}" in own.class_names
    ]


@torch.no_grad()
@pytest.mark.parametrize("name", FOREIGN)
def test_logits_are_those_of_stock_attention(name):
    """Whatever the layout of the projections, and whatever happens behind attention."""
    spec = FOREIGN[name]
    model = build(spec)
    expected = model(IDS).logits
    logits, _ = run(model, spec)
    torch.testing.assert_close(logits, expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", FOREIGN)
def test_keys_and_values_are_not_repeated(name):
    """One per KV head, not one per query head, is what is stored."""
    spec = FOREIGN[name]
    _, running = run(build(spec), spec)
    shape = (len(IDS), spec.num_kv_heads, IDS.shape[1], HEAD_DIM)
    for layer in range(2):
        assert running.keys[layer].shape == shape
        assert running.values[layer].shape == shape


@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon", "falcon-grouped", "gpt_neo", "xglm"])
def test_position_ids_reach_models_that_take_them(name):
    """RoPE and learned positions begin where the request says."""
    spec = FOREIGN[name]
    model = build(spec)
    expected = model(IDS, position_ids=torch.arange(20, 28)[None]).logits
    logits, running = run(model, spec, start=20)
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert not torch.allclose(running.keys[1], run(model, spec)[1].keys[1], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_formed_for_the_wanted_tokens_only(name):
    """Others would cost a product with the whole vocabulary each."""
    spec = FOREIGN[name]
    model = build(spec)
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, __: rows.append(args[0]))
    logits, _ = run(model, spec, kept=torch.tensor([2, 7]))
    assert [row.shape[1] for row in rows] == [2]
    torch.testing.assert_close(logits, model(IDS).logits[:, [2, 7]], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "other"), [("falcon", "FalconFlashAttention2"), ("gpt_neo", "GPTNeoFlashAttention2")]
)
def test_modules_for_flash_attention_attend_alike(name, other):
    """They differ from the others in the kernel they call, which is not called here."""
    spec = FOREIGN[name]
    model = build(spec)
    expected = model(IDS).logits
    for module in attention_modules(model):
        module.__class__ = getattr(import_module(type(module).__module__), other)
    torch.testing.assert_close(run(model, spec)[0], expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forwards_come_back_when_the_pass_has_ended(name):
    """The owner's logits and the modules' attributes are those from before."""
    spec = FOREIGN[name]
    model = build(spec)
    before, implementation = model(IDS).logits, model.config._attn_implementation
    run(model, spec)
    run(model, spec)
    assert all("forward" not in vars(module) for module in attention_modules(model))
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(IDS).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forwards_come_back_when_the_pass_raises(name):
    """Also on an error in a layer."""
    spec = FOREIGN[name]
    model = build(spec)
    before, implementation = model(IDS).logits, model.config._attn_implementation

    def fail(*_):
        raise ZeroDivisionError

    handle = attention_modules(model)[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(model, spec)
    handle.remove()
    assert all("forward" not in vars(module) for module in attention_modules(model))
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(IDS).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_model_is_run_by_one_at_a_time_when_several_runners_share_it(name):
    """No pass meets the layers of another, and the owner finds its own forwards afterwards."""
    spec = FOREIGN[name]
    model = build(spec)
    expected = {row: model(IDS[row : row + 1]).logits for row in (0, 1)}
    wrong = []

    def repeat(row):
        for _ in range(5):
            logits, _ = run(model, spec, IDS[row : row + 1])
            if not torch.allclose(logits, expected[row], **CLOSE):
                wrong.append(row)

    threads = [threading.Thread(target=repeat, args=(row,)) for row in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.equal(model(IDS[:1]).logits, expected[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_owner_is_told_when_another_thread_calls_the_model_during_a_pass(name):
    """An error with advice, and the running pass has not heard of it."""
    spec = FOREIGN[name]
    model = build(spec)
    running = DensePass(spec.positions)
    errors = errors_of_the_owner(model, IDS, running)
    assert len(errors) == 1
    assert "serialise the calls" in errors[0]
    assert running.num_layers_served == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pass_is_refused_when_a_layer_is_of_an_unknown_class(name):
    """A subclass may compute anything, so its forward is its own; its KV would be missing."""
    spec = FOREIGN[name]
    model = build(spec)
    module = attention_modules(model)[1]
    module.__class__ = type("Custom", (type(module),), {})
    with pytest.raises(ModelError, match="1 of 2 layers attend with a class that pc-rag knows"):
        run(model, spec)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pass_is_refused_when_somebody_else_replaced_a_forward(name):
    """Ours would bypass it; nothing is swapped, and theirs stays."""
    spec = FOREIGN[name]
    model = build(spec)
    first, second = attention_modules(model)
    second.forward = theirs = second.forward
    with pytest.raises(ModelError, match="was replaced"):
        run(model, spec)
    assert "forward" not in vars(first)
    assert second.forward is theirs
    assert model.config._attn_implementation != "pc_rag"


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_run_when_modules_are_swapped(name):
    """Hooks of torch are run around whichever forward a module has."""
    spec = FOREIGN[name]
    model = build(spec)
    module = attention_modules(model)[1]
    module.register_forward_hook(lambda _, __, out: (2 * out[0], *out[1:]))
    torch.testing.assert_close(run(model, spec)[0], model(IDS).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_of_accelerate_run_when_modules_are_swapped(name):
    """They bring offloaded weights back: a pass runs between them, and they stay."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is an extra (gguf)")
    calls = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append("before")
            return args, kwargs

        def post_forward(self, module, output):
            calls.append("after")
            return output

    spec = FOREIGN[name]
    model = build(spec)
    expected = model(IDS).logits
    module = attention_modules(model)[1]
    hooks.add_hook_to_module(module, Hook())
    hooked, aside = module.forward, module._old_forward
    torch.testing.assert_close(run(model, spec)[0], expected, **CLOSE)
    assert calls == ["before", "after"]
    assert module.forward is hooked
    assert module._old_forward is aside
    hooks.remove_hook_from_module(module)
    assert torch.equal(model(IDS).logits, expected)


@torch.no_grad()
def test_passes_reach_the_model_when_it_is_compiled():
    """Neither a pass nor a forward is baked in: each pass is served, and the owner as before."""
    spec = FOREIGN["falcon"]
    model = build(spec)
    expected = model(IDS).logits
    for module in attention_modules(model):
        module.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(model(IDS).logits, expected)
        logits, running = run(model, spec)
        torch.testing.assert_close(logits, expected, **CLOSE)
        assert running.num_layers_served == 2
