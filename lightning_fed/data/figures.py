"""The split as a picture."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["split_figure"]

_MAX_ROWS = 500


def split_figure(class_counts: npt.NDArray[Any]) -> "Figure":
    """Draws how many samples of each class each client holds.

    Args:
        class_counts: Samples of each client and class, shape (clients, classes).

    Returns:
        A figure that belongs to no window system: save it with ``figure.savefig``. Above 500 clients a row is the mean
        over neighbouring clients.
    """
    # pyplot would choose a window system and keep the figure alive.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = class_counts.shape
    rows = _merge_rows(np.asarray(class_counts, dtype=np.float64))
    figure = Figure(figsize=(min(3 + 0.3 * num_classes, 12), min(2 + 0.15 * len(rows), 10)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        extent=(-0.5, num_classes - 0.5, num_clients - 0.5, -0.5),
    )
    axes.set(xlabel="class", ylabel="client", title=f"{num_clients} clients × {num_classes} classes")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="samples")
    return figure


def _merge_rows(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Averages neighbouring rows so that at most 500 are left."""
    step = -(-len(counts) // _MAX_ROWS)
    starts = np.arange(0, len(counts), step)
    sizes = np.diff(np.append(starts, len(counts)))
    return np.asarray(np.add.reduceat(counts, starts, axis=0) / sizes[:, None])
