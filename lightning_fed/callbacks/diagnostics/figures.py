"""Pictures of a finished run: predictions of a classifier, and distributions over clients and coordinates."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from lightning_fed.callbacks.diagnostics.predictions import Predictions, Shown
from lightning_fed.data.summary import image_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["agreement_figure", "confusion_figure", "distribution_figure", "predictions_figure"]

_MAX_NAMES = 20
_COLUMNS = 10
_RIGHT, _WRONG = "tab:green", "tab:red"


def confusion_figure(confusion: npt.NDArray[np.int64], class_names: Sequence[str]) -> "Figure":
    """Draws the share of each label's samples that is predicted as each class.

    ``confusion`` is of shape (C, C), by label and prediction. Names and shares are shown for at most 20 classes.
    """
    total, classes = confusion.sum(), len(confusion)
    shares = confusion / confusion.sum(axis=1, keepdims=True).clip(min=1)
    size = min(3.5 + 0.35 * classes, 10)
    figure, axes = new_figure(size + 1, size)
    image = axes.imshow(shares, interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
    accuracy = np.trace(confusion) / max(total, 1)
    axes.set(xlabel="prediction", ylabel="label", title=f"accuracy {accuracy:.3f} over {total} samples")
    if classes <= _MAX_NAMES:
        longest = max(map(len, class_names))
        axes.set_xticks(range(classes), class_names, rotation=0 if longest < 4 else 90)
        axes.set_yticks(range(classes), class_names)
        for (row, column), share in np.ndenumerate(shares):
            colour = "black" if share > 0.6 else "white"
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, label="share of the label's samples" + " (cells: %)" * (classes <= _MAX_NAMES))
    return figure


def predictions_figure(
    predictions: Predictions, names: Sequence[str], mean: Sequence[float] | None, std: Sequence[float] | None
) -> "Figure":
    """Draws images with right and with wrong predictions, ten in a row, each above its label and its prediction.

    The normalisation by ``mean`` and ``std`` of the channels is undone; without them images are scaled to [0, 1].
    """
    rows: list[tuple[str, list[Shown]]] = []
    for word, right in (("right", True), ("wrong", False)):
        drawn = predictions.drawn(right)
        rows += [(word, drawn[at : at + _COLUMNS]) for at in range(0, len(drawn), _COLUMNS)]
    images = image_table([torch.stack([one.image for one in row]) for _, row in rows], _COLUMNS, mean, std)
    height, width = images.shape[2:4]
    gap = max(1, height // 12)
    step = height + max(gap, height // 3)  # with room for a line of text
    padded = np.pad(images, ((0, 0), (0, 0), (0, step - height), (0, gap), (0, 0)), constant_values=1)
    mosaic = padded.transpose(0, 2, 1, 3, 4).reshape(len(rows) * step, _COLUMNS * (width + gap), 3)
    figure, axes = new_figure(1 + 0.9 * _COLUMNS, 0.4 + 0.9 * len(rows) * step / width)
    axes.imshow(mosaic, interpolation="nearest")
    for at, (word, row) in enumerate(rows):
        for column, (_, label, predicted) in enumerate(row):
            text = names[label] if label == predicted else f"{names[label]} → {names[predicted]}"
            place = column * (width + gap) + (width - 1) / 2, at * step + height
            axes.text(*place, text, ha="center", va="top", fontsize=7, color=_RIGHT if word == "right" else _WRONG)
    axes.set_yticks([at * step + (height - 1) / 2 for at in range(len(rows))], [word for word, _ in rows])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("label, or label → prediction")
    return figure


def distribution_figure(values: Mapping[str, Sequence[float]]) -> "Figure":
    """Draws how the finite values of metrics are distributed over clients: violins, extremes and medians."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 2.5 * len(values), 4), layout="constrained")
    for axes, (name, each) in zip(figure.subplots(1, len(values), squeeze=False)[0], values.items(), strict=True):
        axes.violinplot(each, showmedians=True)
        axes.set(title=name, xlabel=f"{len(each)} clients", xticks=[])
    return figure


def agreement_figure(counts: npt.NDArray[np.int64], coin_flips: npt.NDArray[np.float64], threshold: float) -> "Figure":
    """Draws the distribution of the agreement A, the one that coin flips would give, and τ.

    ``counts`` of coordinates and shares of ``coin_flips`` are both for bins of equal width over [0, 1].
    """
    edges = np.linspace(0, 1, len(counts) + 1)
    figure, axes = new_figure(5, 3.5)
    axes.stairs(counts / counts.sum(), edges, fill=True)
    axes.stairs(coin_flips, edges, color="tab:orange", linewidth=1.5, label="coin flips")
    axes.axvline(threshold, color="black", linewidth=1, linestyle="--", label=f"τ = {threshold:g}")
    axes.set(xlabel="agreement A", ylabel="share of coordinates", title=f"{counts.sum()} coordinates")
    axes.legend(frameon=False)
    return figure
