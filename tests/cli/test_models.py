"""``pc-rag models check`` shows what a model can do, and says why it cannot be used."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, MambaConfig

from tests.support.cli import run
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Saved tiny models, by architecture."""

    def save(name):
        model, tokenizer = tiny_model(name)
        folder = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


def test_report_shows_what_was_found_when_a_model_is_supported(folder_of):
    """Placement, layers, windows, scores, limits, bytes and the self-check, for people."""
    done = run("models", "check", folder_of("gemma2"), "--dtype", "float32")
    assert done.exit_code == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "architecture Gemma2ForCausalLM" in shown
    assert "an entry stands anywhere (rotate" in shown
    assert "visibility module, prefix, scaffold" in shown
    assert "position IDs 2,048" in shown
    assert "stored KV 1,024 bytes a token, 1.0 MiB for 1,000 tokens" in shown
    assert "self-check passed with" in shown
    assert "across a window of 16" in shown
    assert "1 RoPE (32 of 32 channels) 16 capped at 5" in shown
    assert "1 RoPE (32 of 32 channels) all before it capped at 5" in shown


def test_report_is_one_document_when_json_is_asked_for(folder_of):
    """All of it, by the names of ``Capabilities``."""
    found = run("models", "check", folder_of("gpt_oss"), "--dtype", "bfloat16", "--json").json
    assert found["placement"] == "rotate"
    assert found["dtype"] == "bfloat16"
    assert found["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert [layer["window"] for layer in found["layers"]] == [16, None]
    assert all(layer["has_sinks"] for layer in found["layers"])
    check = found["self_check"]
    assert 0 <= check["own_difference"] <= check["tolerance"]


@pytest.mark.parametrize(
    ("name", "placement", "text"), [("gpt2", "fixed", "only where"), ("bloom", "free", "anywhere")]
)
def test_placement_is_told_when_keys_are_not_rotated(folder_of, name, placement, text):
    """Learned positions hold entries where they are, ALiBi lets them stand anywhere."""
    done = run("models", "check", folder_of(name))
    assert f"{text}" in done.stdout
    assert f"({placement}: " in done.stdout


def test_limit_is_the_users_when_they_set_one(folder_of):
    """Fewer position IDs than the model has, and not more."""
    folder = folder_of("llama")
    assert run("models", "check", folder, "--max-position", 100, "--json").json[
        "max_position"
    ] == 100  # fmt: skip
    refused = run("models", "check", folder, "--max-position", 4096)
    assert refused.exit_code == 2
    assert "4096 is more than the 2048 position IDs" in refused.stderr


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (MambaConfig(), "needs a key and a value per token in every layer"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "Use linear, llama3 or YaRN scaling",
        ),
    ],
    ids=["recurrent", "dynamic-ntk"],
)
def test_exit_code_is_3_when_a_model_is_refused(tmp_path, config, needed):
    """The message names architecture, property and need; nothing is on stdout."""
    fields = config.to_dict() | {"architectures": ["SomeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    done = run("models", "check", tmp_path)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "error: SomeForCausalLM is not supported: " in done.stderr
    assert needed in done.stderr


def test_exit_code_is_3_when_there_is_no_model(tmp_path):
    """A folder without a model is named."""
    done = run("models", "check", tmp_path)
    assert done.exit_code == 3
    assert "holds no config.json" in done.stderr
