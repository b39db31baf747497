"""The README's tables of models, out of what is found on tiny ones of each architecture.

    python -m tests.support.support_table --write

A row says what detection sees on the model, never what its name suggests.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.detection.capabilities import layer_kinds
from pc_rag.model.detection.detect import detect
from pc_rag.model.detection.support import check_supported
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.detection.capabilities import LayerKind

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"


@dataclass(frozen=True)
class Row:
    """What the README says of an architecture, beside the models that people know it by."""

    architecture: str
    encoding: str
    placement: str
    windows: str
    remarks: str


@cache
def row_of(name: str) -> Row:
    """What is found on a tiny model of an architecture."""
    model, _ = tiny_model(name)
    found = detect(model)
    layers = layer_kinds(found, model.config)
    remarks = ["capped scores"] * any(layer.softcap is not None for layer in layers)
    remarks += ["attention sinks"] * any(layer.has_sinks for layer in layers)
    return Row(
        architecture=type(model).__name__,
        encoding="; ".join(dict.fromkeys(layer.encoding for layer in layers)),
        placement=found.positions.placement.value,
        windows=_windows(layers),
        remarks=", ".join(remarks),
    )


def _windows(layers: Sequence[LayerKind]) -> str:
    has_window = [layer.window is not None for layer in layers]
    if all(has_window):
        return "every layer"
    return "some layers" if any(has_window) else ""


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5Config", {}),
    "Mamba": ("MambaConfig", {}),
    "RWKV": ("RwkvConfig", {}),
    "RecurrentGemma": ("RecurrentGemmaConfig", {}),
    "Jamba": ("JambaConfig", {}),
    "Qwen 3 Next": ("Qwen3NextConfig", {}),
    "Llama 4": ("Llama4TextConfig", {}),
    "DeepSeek-V3.2": ("DeepseekV32Config", {}),
    "models with images, such as Qwen2-VL": ("Qwen2VLConfig", {}),
    "any, with dynamic NTK": ("LlamaConfig", _rope("dynamic", factor=2.0)),
    "any, with a RoPE of several positions": ("Qwen2Config", _rope("default", mrope_section=[8])),
    "any, with an unknown RoPE": ("LlamaConfig", _rope("unknown")),
}
"""Models that are refused by their configuration: its class, and what is set in it."""


@dataclass(frozen=True)
class Refusal:
    """What a refused model lacks, and what would be needed: the error's own words."""

    lacks: str
    needed: str


def refusal_of(name: str) -> Refusal:
    """Why a model is refused. The test is skipped where transformers has not got it."""
    kind, fields = REFUSED[name]
    build = getattr(transformers, kind, None)
    if build is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    try:
        check_supported(build(**fields))
    except UnsupportedModelError as error:
        # "X is not supported: it is so. What would be needed": what it is may be said otherwise by
        # another version of transformers.
        return Refusal(error.capability, str(error).partition(". ")[2])
    raise LookupError(f"{name} is not refused any more; move it to the supported architectures")


def supported_table() -> list[str]:
    """A line for each architecture; variants that differ in their geometry alone share one."""
    families: dict[Row, list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        families.setdefault(row_of(name), []).append(architecture.family)
    return [
        "| models | class in transformers | positions | placement | windows | remarks |",
        "|---|---|---|---|---|---|",
        *(
            f"| {'; '.join(names)} | `{row.architecture}` | {row.encoding} | `{row.placement}` "
            f"| {row.windows} | {row.remarks} |"
            for row, names in families.items()
        ),
    ]


def refused_table() -> list[str]:
    """A line for each reason."""
    names: dict[Refusal, list[str]] = {}
    for name in REFUSED:
        names.setdefault(refusal_of(name), []).append(name)
    return [
        "| refused | for lack of | what would be needed |",
        "|---|---|---|",
        *(
            f"| {'; '.join(models)} | {refusal.lacks} | {refusal.needed}. |"
            for refusal, models in names.items()
        ),
    ]


def with_tables(page: str) -> str:
    """A page whose tables are what was found."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    tables = "\n".join([*supported_table(), "", *refused_table()])
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{behind}"


def main() -> None:
    """Write the tables into the README, or say whether it has them."""
    page = README.read_text(encoding="utf-8")
    new = with_tables(page)
    if "--write" in sys.argv[1:]:
        README.write_text(new, encoding="utf-8")
    elif new != page:
        sys.exit("README.md is behind: python -m tests.support.support_table --write")


if __name__ == "__main__":
    main()
