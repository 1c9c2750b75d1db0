"""Draws what the mask of GMA does to accuracy, what FedAvg's step of the same progress does, and the rest.

    python docs/why_figure.py

reads docs/results/gma/why/results.csv and writes docs/images/gma-why.png: for each setting the difference of two rules
in each seed, and its mean. The two parts add up to the whole. The rate of 0.5 is
left out: FedAvg collapses there, to 11 to 46 %.
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main", "parts"]

DOCS = Path(__file__).resolve().parent
FAVG, GMA, SHORT = "FedAvg", "GMA", "FedAvg at GMA's progress"
PARTS = {
    "both: GMA − FedAvg": (GMA, FAVG),
    "its shorter way": (SHORT, FAVG),
    "its direction": (GMA, SHORT),
}
COLLAPSED = "0.5"  # the rate
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
COLOURS = ("#3b8bd6", "#009e73", "#d55e00")


def parts(path: Path) -> dict[str, dict[str, list[float]]]:
    """Returns by part and setting the differences of the seeds, in percentage points."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader(path.read_text().splitlines()):
        if row["client rate"] == COLLAPSED:
            continue
        setting = f"{row['clients']}, momentum {row['momentum']}, rate {row['client rate']}"
        found[row["rule"], setting][row["seed"]] = 100 * float(row["test/acc last 10"])
    settings = list(dict.fromkeys(setting for _, setting in found))
    return {
        name: {s: [found[a, s][seed] - found[b, s][seed] for seed in sorted(found[b, s])] for s in settings}
        for name, (a, b) in PARTS.items()
    }


def main() -> None:
    """Draws the picture."""
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
        figure, axes = subplots(1, len(PARTS), figsize=(8, 3.3), sharex=True, sharey=True, layout="constrained")
        found = parts(DOCS / "results/gma/why/results.csv")
        for axis, colour, (name, settings) in zip(axes, COLOURS, found.items(), strict=True):
            for at, differences in enumerate(settings.values()):
                axis.scatter(differences, [at] * len(differences), s=14, color=colour, alpha=0.5)
                axis.plot([0, mean(differences)], [at, at], color=colour)
                axis.scatter([mean(differences)], [at], s=44, color=colour)
            axis.axvline(0, color=GREY, linewidth=0.8)
            axis.set_title(name, fontsize=9)
            axis.set_yticks(range(len(settings)), settings)
            axis.grid(axis="x", color=GREY, alpha=0.25)
        axes[0].invert_yaxis()
        axes[1].set_xlabel("difference in test accuracy, points (large: mean of 3 seeds, small: each)")
        save(figure, DOCS / "images" / "gma-why.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
