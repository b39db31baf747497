"""Tables and plot of the gap study, from its results.

    python benchmarks/gap_report.py benchmarks/results/gap-study-float32-cpu.json

writes the tables into ``docs/gap_study.md`` between their markers, and draws
``docs/images/gap_study.svg``. Drawing needs matplotlib (``pip install 'pc-rag[bench]'``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gap_cells import Place
from gap_reader import Arm
from gap_summary import tables

from pc_rag.errors import require

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PANELS = (
    ("kl", "KL of the first token, nats", "log"),
    ("perplexity_ratio", "perplexity ratio to gapless", "log"),
    ("f1", "answer F1", "linear"),
)
LEAST_KL = 1e-4
"""Where the logarithmic axis of divergences begins."""


def with_tables(page: str, results: Mapping[str, Any]) -> str:
    """A page whose tables are those of the results."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(results)}\n{END}{behind}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw what gaps do, by their size: a column for each arm, a line for each place.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    feature = "the plot of the gap study"
    matplotlib = require("matplotlib", feature=feature, extra="bench")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gap-study"  # the same results give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines of it
    pyplot = require("matplotlib.pyplot", feature=feature, extra="bench")
    figure, axes = pyplot.subplots(
        len(PANELS), len(Arm), figsize=(11, 9), sharex=True, sharey="row", squeeze=False
    )
    for column, arm in enumerate(Arm):
        for row, (name, label, scale) in enumerate(PANELS):
            axis = axes[row][column]
            _draw_panel(axis, results, arm, name)
            axis.set_xscale("log")
            axis.set_yscale(scale)
            if name == "kl":
                axis.set_ylim(bottom=LEAST_KL)
            if not row:
                axis.set_title(arm.value)
            if not column:
                axis.set_ylabel(label)
        axes[-1][column].set_xlabel("position IDs that each gap leaves out")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_panel(axis: Any, results: Mapping[str, Any], arm: Arm, name: str) -> None:
    cells = [cell for cell in results["cells"] if not cell["refused"]]
    lines = dict.fromkeys((cell["place"], cell["num_gaps"]) for cell in cells if cell["num_gaps"])
    for place, num_gaps in lines:
        of_line = [c for c in cells if (c["place"], c["num_gaps"]) == (place, num_gaps)]
        rows = [cell["arms"][arm.value]["summary"][name] for cell in of_line]
        sizes = [cell["size"] for cell in of_line]
        middles = [row["mean"] if "mean" in row else row["value"] for row in rows]
        label = f"{num_gaps} {place}" if num_gaps > 1 else place
        (line,) = axis.plot(sizes, middles, marker="o", markersize=3, label=label)
        lows, highs = [row["low"] for row in rows], [row["high"] for row in rows]
        axis.fill_between(sizes, lows, highs, color=line.get_color(), alpha=0.12, linewidth=0)
    gapless = next((cell for cell in cells if cell["place"] == Place.NOWHERE), None)
    if gapless is not None and name == "f1":
        level = gapless["arms"][arm.value]["summary"][name]["mean"]
        axis.axhline(level, color="black", linewidth=0.8, label="no gap")
    axis.axvline(results["max_position"], color="grey", linestyle=":", linewidth=1)


def main() -> None:
    """Write the tables and draw the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, default=DOCS / "gap_study.md")
    parser.add_argument("--plot", type=Path, default=DOCS / "images" / "gap_study.svg")
    parser.add_argument("--no-plot", action="store_true", help="write the tables alone")
    parsed = parser.parse_args()
    results = json.loads(parsed.results.read_text(encoding="utf-8"))
    page = with_tables(parsed.page.read_text(encoding="utf-8"), results)
    parsed.page.write_text(page, encoding="utf-8")
    if not parsed.no_plot:
        draw(results, parsed.plot)


if __name__ == "__main__":
    main()
