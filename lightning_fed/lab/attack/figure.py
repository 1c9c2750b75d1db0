"""The picture of an attack: true against false positive rates, both on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fed.lab.attack.figures import roc_curve
from lightning_fed.lab.report.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["roc_figure"]


def roc_figure(attacks: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draws the ROC curve of each attack, as steps, beside that of guessing.

    Args:
        attacks: Scores of members and of non-members, shape (n,) each, by the attack's name.
    """
    from matplotlib.figure import Figure

    least = 1 / max(len(scores) for sides in attacks.values() for scores in sides)
    figure = Figure(figsize=(5.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([least, 1], [least, 1], "--", color="0.5", linewidth=1.0, label="guessing")
    for colour, (name, (members, others)) in zip(COLOURS, attacks.items(), strict=False):
        false, true, _ = roc_curve(members, others)
        # On a logarithmic axis there is no 0: what is found without a false alarm is drawn at the left edge.
        axes.step(false.clamp(min=least / 2), true, where="post", color=colour, linewidth=1.6, label=name)
    axes.set(
        xscale="log", yscale="log", xlim=(least / 2, 1), ylim=(least / 2, 1.05),
        xlabel="false positive rate", ylabel="true positive rate",
    )  # fmt: skip
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure
