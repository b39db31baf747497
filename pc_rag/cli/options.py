"""Options that several commands share, so that they read and mean the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

Store = Annotated[
    Path,
    typer.Option("--store", metavar="DIR", envvar="PC_RAG_STORE", help="Folder of the store."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Hub name, model folder, .gguf file, or smollm2. [default: the store's; smollm2 for "
        "a new store]",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Compute dtype: auto, float32, bfloat16 or float16. [default: the store's; auto for "
        "a new store]",
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="Where the model runs: auto, cpu or cuda."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file with settings of the engine."),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        "--embedder",
        metavar="NAME",
        help="sentence-transformers model for retrieval: hub name or folder. [default: the "
        "store's; the packaged MiniLM for a new store]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
