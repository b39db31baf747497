"""``pc-rag models``: look at what a model can do with stored KV."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pc_rag.cli import options
from pc_rag.cli.output import err, key_value_table, out, print_json

if TYPE_CHECKING:
    from pc_rag.model.detection.capabilities import Capabilities, LayerKind
    from pc_rag.model.detection.self_check import SelfCheck

models = typer.Typer(no_args_is_help=True, help="See what a model can do with stored KV.")

_MEBIBYTE = 1 << 20
_TOKENS = 1000


@models.callback()
def _commands() -> None:
    """See what a model can do with stored KV."""


@models.command()
def check(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Hub name, model folder, .gguf file, or smollm2."),
    ],
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Compute dtype: auto, float32, bfloat16 or float16.",
        ),
    ] = "auto",
    device: options.Device = "auto",
    max_position: Annotated[
        int | None,
        typer.Option(
            "--max-position",
            metavar="N",
            min=1,
            help="Position IDs that requests may use. [default: those the model was made for]",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Load a model, prove that its stored KV can be used, and show what was found.

    Position encoding, windows and scores are found out on the model itself, and what is computed
    with stored and moved KV is compared with what the model computes alone. Exits with 3 where a
    model is refused; the message names its architecture, what it lacks, and what would be needed.
    """
    from pc_rag.model.detection.capabilities import capabilities_of
    from pc_rag.model.loading import load_model

    with err.status(f"loading {name}"):
        loaded = load_model(name, dtype=dtype, device=device, max_position=max_position)
    found = capabilities_of(loaded)
    if as_json:
        print_json(asdict(found))
        return
    out.print(_overview(found))
    out.print()
    out.print(_layer_table(found.layers))


def _overview(found: Capabilities) -> Table:
    per_thousand = found.bytes_per_token * _TOKENS / _MEBIBYTE
    stored = (
        f"{found.bytes_per_token:,} bytes a token, {per_thousand:,.1f} MiB for {_TOKENS:,} tokens"
    )
    places = {
        "rotate": "anywhere (rotate: keys are rotated to where they stand)",
        "free": "anywhere (free: keys carry no position)",
        "fixed": "only where it was encoded (fixed: encoded once for each start)",
    }
    return key_value_table(
        [
            ("model", found.name),
            ("architecture", found.architecture),
            ("an entry stands", places[found.placement.value]),
            ("visibility", ", ".join(found.visibilities)),
            ("position IDs", f"{found.max_position:,}"),
            ("computes in", found.dtype),
            ("stored KV", stored),
            ("self-check", _check_text(found.self_check)),
        ]
    )


def _check_text(check: SelfCheck) -> str:
    window = "" if check.window is None else f", across a window of {check.window}"
    return (
        f"passed with {check.num_tokens} tokens{window}: placed KV differs by "
        f"{check.placed_difference:.1e}, logits by {check.own_difference:.1e}, "
        f"allowed {check.tolerance:.1e}"
    )


def _layer_table(layers: tuple[LayerKind, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", justify="right")
    for column in ("positions", "window", "scores"):
        table.add_column(column)
    for layer in layers:
        scores = [] if layer.softcap is None else [f"capped at {layer.softcap:g}"]
        scores += ["attention sinks"] * layer.has_sinks
        rotated = (
            "" if layer.rotary_dim is None else f" ({layer.rotary_dim} of {layer.key_dim} channels)"
        )
        table.add_row(
            f"{layer.num_layers}",
            f"{layer.encoding}{rotated}",
            "all before it" if layer.window is None else f"{layer.window:,}",
            ", ".join(scores) or "plain",
        )
    return table
