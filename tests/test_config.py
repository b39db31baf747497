"""Settings come from the nearest source, and a malformed one is refused where it stands."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.config import _PARSERS, EngineConfig
from pc_rag.errors import ConfigError
from pc_rag.types import PositionPolicy, StorageDtype, Visibility


@pytest.fixture
def settings_file(tmp_path):
    """Writes TOML text and gives its path."""

    def write(text: str):
        path = tmp_path / "pc-rag.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(**arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(environ={}, **arguments)
    return str(caught.value)


def test_defaults_hold_when_nothing_is_given():
    """Loading from empty sources equals constructing without arguments."""
    assert EngineConfig.load(environ={}) == EngineConfig()


def test_every_field_is_parsed_when_a_config_is_made():
    """No setting can be added without a rule for its values."""
    assert list(_PARSERS) == [each.name for each in dataclasses.fields(EngineConfig)]


def test_config_is_frozen_when_someone_assigns():
    """A running engine's settings cannot change under it."""
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.reuse = False


def test_argument_wins_when_every_source_speaks(settings_file):
    """Precedence is argument, file, environment, default, per setting."""
    file = settings_file('chunk_tokens = 20\ntenant = "file"\n')
    environ = {
        "PC_RAG_CHUNK_TOKENS": "10",
        "PC_RAG_TENANT": "environment",
        "PC_RAG_REPAIR": "link:4",
        "PATH": "elsewhere",
        "PC_RAG_OF_ANOTHER_PART": "left alone",
    }
    config = EngineConfig.load(file=file, environ=environ, chunk_tokens=30)
    assert (config.chunk_tokens, config.tenant, config.repair) == (30, "file", "link:4")
    assert config.memory_bytes == EngineConfig().memory_bytes


def test_environment_is_read_when_none_is_passed(monkeypatch):
    """The process's own variables are the default source."""
    monkeypatch.setenv("PC_RAG_SLOT_TOKENS", "512")
    assert EngineConfig.load().slot_tokens == 512


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 * 1024**2),
        ("2GB", 2 * 1000**3),
        ("1.5 gib", 3 * 1024**3 // 2),
        ("7kB", 7000),
        ("0.1kB", 100),
        ("1TiB", 1024**4),
        ("64B", 64),
        ("64", 64),
        (64, 64),
    ],
)
def test_byte_size_is_exact_when_given_as_text_or_number(text, expected):
    """Decimal and binary units differ, and fractions are not rounded through floats."""
    assert EngineConfig(memory_bytes=text).memory_bytes == expected


@given(
    amount=st.integers(1, 10**6), unit=st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB"])
)
def test_byte_size_scales_when_any_amount_and_unit_are_given(amount, unit):
    """An amount of a unit is that many times one unit."""
    one = EngineConfig(disk_bytes=f"1{unit}").disk_bytes
    assert EngineConfig(disk_bytes=f"{amount}{unit}").disk_bytes == amount * one


def test_values_are_typed_when_text_is_given():
    """Text from a file or a variable becomes the enum, number or flag it names."""
    config = EngineConfig.load(
        environ={
            "PC_RAG_POSITION_POLICY": "reserved",
            "PC_RAG_VISIBILITY": "module",
            "PC_RAG_STORAGE_DTYPE": "bfloat16",
            "PC_RAG_DISK_BYTES": "none",
            "PC_RAG_REUSE": "off",
            "PC_RAG_SYNCHRONIZE_TIMINGS": "TRUE",
            "PC_RAG_CONTEXT_LIMIT": "4096",
        }
    )
    assert config.position_policy is PositionPolicy.RESERVED
    assert config.visibility is Visibility.MODULE
    assert config.storage_dtype is StorageDtype.BFLOAT16
    assert config.disk_bytes is None
    assert config.reuse is False
    assert config.synchronize_timings is True
    assert config.context_limit == 4096


def test_none_is_a_value_when_passed_as_an_argument():
    """An explicit None overrides a farther source instead of hiding behind it."""
    config = EngineConfig.load(environ={"PC_RAG_DISK_BYTES": "1GB"}, disk_bytes=None)
    assert config.disk_bytes is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_policy", "dense"),
        ("visibility", "scaffold"),
        ("visibility", None),
        ("repair", "link:0"),
        ("repair", "link"),
        ("repair", "link:8\n"),
        ("memory_bytes", "lots"),
        ("memory_bytes", "-1"),
        ("memory_bytes", "1XB"),
        ("memory_bytes", "1\u0663"),
        ("memory_bytes", 0),
        ("memory_bytes", 1.5),
        ("memory_bytes", 2**63),
        ("memory_bytes", "9" * 5000),
        ("memory_bytes", None),
        ("disk_bytes", ""),
        ("prefix_cache_bytes", -1),
        ("storage_dtype", "int3"),
        ("slot_tokens", 0),
        ("slot_tokens", True),
        ("chunk_tokens", "12 tokens"),
        ("tenant", 7),
        ("tenant", "\udc80"),
        ("reuse", 1),
        ("reuse", "maybe"),
        ("context_limit", {"tokens": 4096}),
    ],
)
def test_malformed_value_is_refused_when_given_as_an_argument(name, value):
    """The error names the argument, what was observed and what is allowed."""
    message = refusal(**{name: value})
    assert message.startswith(f"argument {name}: {value!r} is not ")
    with pytest.raises(ConfigError):
        EngineConfig(**{name: value})


def test_source_is_named_when_a_value_in_a_file_is_malformed(settings_file):
    """The file and the key are in the message."""
    file = settings_file('reuse = "maybe"\n')
    assert refusal(file=file) == f"file {file}, key reuse: 'maybe' is not true or false"


def test_source_is_named_when_a_variable_is_malformed():
    """A malformed variable is an error, not a reason to take the default."""
    with pytest.raises(
        ConfigError, match=r"^environment variable PC_RAG_CHUNK_TOKENS: '' is not a whole number"
    ):
        EngineConfig.load(environ={"PC_RAG_CHUNK_TOKENS": ""})


def test_all_problems_are_listed_when_several_values_are_malformed():
    """One error shows everything there is to mend."""
    message = refusal(reuse="maybe", chunk_tokens=0)
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "argument chunk_tokens",
        "argument reuse",
    ]


def test_nearest_name_is_suggested_when_a_key_is_unknown(settings_file):
    """A misspelt key is refused, since ignoring it would be a silent default."""
    file = settings_file("memory_byte = 1\n")
    assert refusal(file=file) == (
        f"file {file}, key memory_byte: no such setting; did you mean memory_bytes?"
    )


def test_settings_are_listed_when_an_unknown_argument_resembles_none():
    """Without a near name the message lists what exists."""
    assert "settings are position_policy, visibility" in refusal(zzz=1)


@pytest.mark.parametrize("text", ["chunk_tokens = \nreuse = true\n", "tenant = 'a' 'b'\n"])
def test_file_is_refused_when_it_is_not_toml(settings_file, text):
    """The parser's line and column reach the reader."""
    file = settings_file(text)
    message = refusal(file=file)
    assert message.startswith(f"file {file}: not TOML: ")
    assert "line 1, column" in message


def test_file_is_refused_when_it_is_not_utf8(tmp_path):
    """Bytes in another encoding are no settings."""
    file = tmp_path / "latin.toml"
    file.write_bytes(b'tenant = "\xe9"')
    assert "not TOML" in refusal(file=file)


def test_file_is_refused_when_it_does_not_exist(tmp_path):
    """A named file that is absent is an error, not an empty file."""
    assert "cannot be read" in refusal(file=tmp_path / "absent.toml")


def test_contradiction_names_both_sources_when_chunks_outgrow_slots(settings_file):
    """A chunk longer than its slot could never be placed under `reserved`."""
    message = refusal(file=settings_file("slot_tokens = 100\n"))
    assert "chunk_tokens is 256 (default) but slot_tokens is 100 (file " in message


def test_config_is_accepted_when_chunks_just_fill_their_slots():
    """The limit itself is allowed."""
    assert EngineConfig(slot_tokens=256, chunk_tokens=256).slot_tokens == 256


def test_validation_repeats_when_a_config_is_replaced():
    """`dataclasses.replace` cannot make a config that the constructor would refuse."""
    with pytest.raises(ConfigError):
        dataclasses.replace(EngineConfig(), chunk_tokens=0)
