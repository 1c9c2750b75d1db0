"""Draws what GMA's mask does over the clients' and the server's learning rate.

    python docs/rates_figure.py

reads docs/results/gma/table10/table.csv and writes docs/images/gma-rates.png: with momentum and without, for each pair
of rates the difference of GMA to FedAvg in points, bold where its 95 % interval excludes 0.
"""

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
CLIENTS, SERVERS = ("0.001", "0.01", "0.05", "0.1"), ("0.01", "0.1", "1.0", "1.5", "2.0")
MOMENTUM = {"0.9": "momentum 0.9", "0.0": "no momentum"}


def draw(axis: Axes, rows: list[dict[str, str]]) -> None:
    """Draws a cell for each pair of rates."""
    for row in rows:
        at = CLIENTS.index(row["client rate"]), SERVERS.index(row["server rate"])
        if row["verdict"] in ("", "nothing learned"):
            axis.text(*at, "–" if row["difference"] else "diverged", ha="center", va="center", fontsize=8)
            continue
        difference, low, high = (100 * float(row[name]) for name in ("difference", "t_low", "t_high"))
        colour, sure = "#009e73" if difference > 0 else "#d55e00", low > 0 or high < 0
        axis.scatter(*at, s=1300, marker="s", color=colour, alpha=min(0.35, 0.05 + abs(difference) / 80), linewidths=0)
        text = f"{difference:+.1f}".replace("-", "−")
        axis.text(*at, text, ha="center", va="center", fontsize=9, fontweight="bold" if sure else "normal")


def main() -> None:
    """Draws the picture."""
    rows = list(csv.DictReader((DOCS / "results/gma/table10/table.csv").open()))
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
        figure, grid = subplots(1, 2, figsize=(7, 3.4), sharey=True, layout="constrained")
        for axis, (momentum, title) in zip(grid, MOMENTUM.items(), strict=True):
            chosen = {"momentum": momentum, "aggregation": "GMA"}
            draw(axis, [row for row in rows if chosen.items() <= row.items() and row["client rate"] in CLIENTS])
            axis.set_title(title, fontsize=9)
            axis.set_xticks(range(len(CLIENTS)), CLIENTS)
            axis.set_yticks(range(len(SERVERS)), SERVERS)
            axis.set_xlim(-0.6, len(CLIENTS) - 0.4)
            axis.set_ylim(len(SERVERS) - 0.4, -0.6)
            axis.set_xlabel("client rate")
        grid[0].set_ylabel("server rate")
        save(figure, DOCS / "images" / "gma-rates.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
