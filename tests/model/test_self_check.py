"""A model is used once its stored KV gives what it computes by itself, and not before."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half

from pc_rag.errors import UnsupportedModelError
from pc_rag.model import hf_attention
from pc_rag.model.detection import self_check
from pc_rag.model.detection.detect import detect
from pc_rag.model.detection.self_check import SelfCheck, check_model, passed_check
from pc_rag.model.loading import wrap_model
from pc_rag.model.positions import Alibi, LayerAttention, ModelPositions
from pc_rag.types import Fingerprint
from tests.support.architectures import ARCHITECTURES, WINDOW
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PC_RAG_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_check_is_passed_when_the_architecture_is_known(name):
    """Far below the tolerance, window exercised where there is one."""
    model, _ = tiny_model(name)
    check = check_model(model, detect(model))
    assert check.placed_difference < check.tolerance / 10
    assert check.own_difference < check.tolerance / 10
    windows = [window for window in ARCHITECTURES[name].windows if window]
    assert check.window == (WINDOW if windows else None)


@pytest.mark.parametrize("num_heads", [12, 32])
def test_check_is_passed_when_slopes_are_no_round_numbers(num_heads):
    """Falcon's own products of slope and position are rounded to bfloat16; ours are not."""
    model, _ = tiny_model("falcon-rw", num_attention_heads=num_heads, hidden_size=16 * num_heads)
    assert check_model(model, detect(model)).own_difference < 1e-4


def changed(found, **changes):
    """What was found, with layers that attend otherwise."""
    kinds = {
        kind: LayerAttention(
            changes.get("encoding", kind.encoding), changes.get("window", kind.window)
        )
        for kind in found.positions.kinds
    }
    layers = tuple(kinds[layer] for layer in found.positions.layers)
    object.__setattr__(found, "positions", ModelPositions(layers))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 7, 9])
def test_model_is_refused_when_its_window_is_another(window, dtype):
    """One token more or less is seen."""
    model, _ = tiny_model("mistral", sliding_window=8, dtype=dtype)
    found = changed(detect(model), window=window)
    with pytest.raises(UnsupportedModelError, match=r"the model's own by [\d.]+ .*allowed 0\.0"):
        check_model(model, found)


def test_model_is_refused_when_its_slopes_are_others():
    """ALiBi a tenth steeper."""
    model, _ = tiny_model("bloom")
    found = detect(model)
    slopes = found.positions.layers[0].encoding.slopes
    with pytest.raises(UnsupportedModelError, match=r"the model's own by [\d.]+"):
        check_model(model, changed(found, encoding=Alibi(slopes * 1.1)))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_model_is_refused_when_it_hands_over_less_than_it_uses(name, monkeypatch):
    """Soft-capping and sinks that only the model's own attention knows of."""
    ours = hf_attention._attention

    def forgetful(*args, softcap=None, s_aux=None, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(hf_attention, "_attention", forgetful)
    model, _ = tiny_model(name)
    with pytest.raises(UnsupportedModelError, match=r"the model's own by [\d.]+") as caught:
        check_model(model, detect(model))
    assert caught.value.capability == "attention"


def test_model_is_refused_when_its_own_attention_scales_otherwise():
    """Code that the owner has patched: what is handed over is not what is computed."""
    model, _ = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.25
    found = detect(model)
    check_model(model, found)  # another scaling is handed over, too

    class Patched(LlamaAttention):
        def forward(self, *args, **kwargs):
            is_ours = self.config._attn_implementation == "pc_rag"
            self.scaling = 0.25 if is_ours else 0.5
            return super().forward(*args, **kwargs)

    model.model.layers[1].self_attn.__class__ = Patched
    with pytest.raises(UnsupportedModelError, match="does more than pc-rag was told of"):
        check_model(model, found)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_neo"])
def test_wide_window_is_compared_when_the_text_is_shorter(name):
    """It is lowered for the comparison where it can be; else the text is made longer."""
    changes = {"window_size": 256} if name == "gpt_neo" else {"sliding_window": 1000}
    model, _ = tiny_model(name, **changes)
    found = detect(model)
    check = check_model(model, found)
    assert check.window == (256 if name == "gpt_neo" else 16)
    assert (check.num_tokens > 256) == (name == "gpt_neo")
    assert max(layer.window or 0 for layer in found.positions.layers) in (256, 1000)


def test_model_is_as_it_was_when_its_window_was_lowered():
    """Configuration and layers hold their own size again."""
    model, _ = tiny_model("gemma2", sliding_window=1000)
    sizes = [layer.self_attn.sliding_window for layer in model.model.layers]
    check_model(model, detect(model))
    assert model.config.sliding_window == 1000
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "bloom", "gpt2", "deepseek_v3", "qwen3_moe"])
def test_check_is_passed_when_the_model_rounds(name, dtype):
    """Tolerances follow the dtype."""
    model, _ = tiny_model(name, dtype=dtype)
    check = check_model(model, detect(model))
    assert check.own_difference < check.tolerance


@pytest.mark.parametrize("max_position", [4, 8, 40])
@pytest.mark.parametrize("name", ["llama", "gptj", "gpt2", "opt", "gpt_neo", "bloom", "mpt"])
def test_check_is_passed_when_the_model_has_few_positions(name, max_position):
    """The texts fit them: tables end there."""
    model, _ = tiny_model(name, max_position_embeddings=max_position)
    assert check_model(model, detect(model, max_position=max_position)).num_tokens <= max_position


def test_check_runs_once_when_nothing_changes(monkeypatch):
    """In a process by fingerprint and code; in the user's cache for code that is transformers'."""
    runs = []
    original = check_model

    def count(model, found):
        runs.append(model)
        return original(model, found)

    monkeypatch.setattr(self_check, "check_model", count)
    monkeypatch.setattr(self_check, "_PASSED", {})
    model, tokenizer = tiny_model("llama")
    first = wrap_model(model, tokenizer)
    assert wrap_model(model, tokenizer).self_check is first.self_check
    assert len(runs) == 1
    model.model.norm.weight.data += 1  # another fingerprint
    wrap_model(model, tokenizer)
    assert len(runs) == 2
    again, tokenizer = tiny_model("llama")
    wrap_model(again, tokenizer)
    assert len(runs) == 2, "the same weights and the same code"
    wrap_model(again, tokenizer, max_position=512)
    assert len(runs) == 3
    again.model.forward = again.model.forward  # replaced, for all we know
    wrap_model(again, tokenizer)
    assert len(runs) == 4
    del again.model.forward
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda states: -rotate_half(-states))
    wrap_model(again, tokenizer)
    assert len(runs) == 5, "functions beside a model's classes are its code"


def test_check_is_kept_for_other_processes_when_it_is_told_to(monkeypatch):
    """In the user's cache folder, under the fingerprint."""
    monkeypatch.setattr(self_check, "_PASSED", {})
    model, _ = tiny_model("llama")
    found, fingerprint = detect(model), Fingerprint("f" * 64)
    kept = passed_check(model, found, fingerprint, is_kept=True)
    monkeypatch.setattr(self_check, "_PASSED", {})
    monkeypatch.setattr(self_check, "check_model", None)
    assert passed_check(model, found, fingerprint, is_kept=True) == kept


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "bloom"])
def test_check_is_neither_kept_nor_believed_when_code_was_replaced(name, monkeypatch, tmp_path):
    """Kernels of other packages are put over those of transformers in practice."""
    model, _ = tiny_model(name)
    found, fingerprint = detect(model), Fingerprint("f" * 64)
    monkeypatch.setattr(self_check, "_PASSED", {})
    runs = []
    original = check_model

    def count(*args):
        runs.append(args)
        return original(*args)

    monkeypatch.setattr(self_check, "check_model", count)
    modeling = sys.modules[type(model).__module__]
    with monkeypatch.context() as patched:
        patched.setattr(modeling, "faster", lambda states: states, raising=False)
        passed_check(model, found, fingerprint, is_kept=True)
    assert not (tmp_path / "cache").exists()
    passed_check(model, found, fingerprint, is_kept=True)
    assert len(list((tmp_path / "cache" / "checks").iterdir())) == 1
    assert len(runs) == 2
    self_check._PASSED.clear()
    monkeypatch.setattr(modeling, "faster", lambda states: states, raising=False)
    passed_check(model, found, fingerprint, is_kept=True)
    assert len(runs) == 3


def test_check_is_passed_when_a_class_has_no_module():
    """Classes of notebooks and of code that was run from text."""
    model, tokenizer = tiny_model("llama")
    kind = type(model.model.norm)
    model.model.norm.__class__ = type("Norm", (kind,), {"__module__": "gone"})
    wrap_model(model, tokenizer)


def test_kept_check_is_refused_when_it_is_damaged():
    """What is not a check is not one."""
    check = SelfCheck(
        placed_difference=1e-6, own_difference=2e-6, tolerance=1e-3, num_tokens=64, window=None
    )
    assert SelfCheck.from_json(check.to_json()) == check
    unreadable = check.to_json().replace("64", '"64"')
    failed = check.to_json().replace("2e-06", "NaN")
    for text in ("[]", '{"window": 1}', unreadable, failed):
        with pytest.raises(ValueError, match="not a self-check"):
            SelfCheck.from_json(text)
