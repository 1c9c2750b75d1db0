"""Draws how each client's models compare with FedAvg's model tuned on the client.

    python docs/personal_figure.py

reads docs/results/personal/STUDY/table.csv and writes docs/images/personal.png: for each method the accuracy of own
models (disks) and of the tuned global model (squares) less that of FedAvg's tuned one, with 95 % intervals over seeds.
"""

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["main"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
GREY = "#808080"  # reads on white and on black
STUDIES = {
    "fashionmnist": "FashionMNIST, 2 classes",
    "emnist": "EMNIST, Dirichlet 0.1",
    "rotated": "MNIST, an angle a client",
}
MODELS = {"own": ("o", "#009e73"), "tuned": ("s", "#0072b2")}
# Arms whose models are far off or mean something else; the page's tables have them.
LEFT_OUT = ("centralised",)


def differences(study: str, model: str) -> dict[str, tuple[float, float, float]]:
    """Returns mean, low and high end of each method's difference, in points."""
    metric = f"per_client/{model}/acc"
    table = csv.DictReader((DOCS / "results/personal" / study / "table.csv").open())
    rows = [r for r in table if r["metric"] == metric and r["t_low"] and r["method"] not in LEFT_OUT]
    names = ("difference", "t_low", "t_high")
    return {row["method"]: tuple(100 * float(row[name]) for name in names) for row in rows}  # type: ignore[misc]


def main() -> None:
    """Draws the picture."""
    found = {study: {model: differences(study, model) for model in MODELS} for study in STUDIES}
    methods = list(dict.fromkeys(m for models in found.values() for cells in models.values() for m in cells))
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "font.size": 9}):
        figure, axes = subplots(1, len(STUDIES), figsize=(8.5, 5.2), sharey=True, layout="constrained")
        for axis, (study, title) in zip(axes, STUDIES.items(), strict=True):
            for shift, (model, (mark, colour)) in zip((-0.18, 0.18), MODELS.items(), strict=True):
                for method, (mean, low, high) in found[study][model].items():
                    at = methods.index(method) + shift
                    axis.errorbar(mean, at, xerr=[[mean - low], [high - mean]], fmt=mark, color=colour, capsize=2)
                axis.plot([], [], mark, color=colour, label=model)
            axis.axvline(0, color=GREY, linewidth=0.8)
            axis.set_title(title, fontsize=10)
            axis.set_xlim(-12, 8)
            axis.set_xlabel("to FedAvg's tuned model, points")
            axis.grid(axis="x", color=GREY, alpha=0.25)
        axes[0].set_yticks(range(len(methods)), methods)
        axes[0].set_ylim(len(methods) - 0.5, -0.5)
        axes[-1].legend(loc="center left", framealpha=0)
        save(figure, DOCS / "images/personal.png", dpi=140, transparent=True)


if __name__ == "__main__":
    main()
