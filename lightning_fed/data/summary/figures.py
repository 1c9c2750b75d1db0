"""The split as pictures: who holds which classes, how many samples, and what they look like."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.label_statistics import count_labels
from lightning_fed.data.sources import BatchSource
from lightning_fed.data.summary.samples import SampleSheet, sample_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["new_figure", "samples_figure", "sizes_figure", "split_figure", "split_figures"]

_MAX_ROWS = 500
_MAX_NAMES = 20
_MAX_BINS = 40
# With more classes a picture of clients by classes shows nothing, and its table can be larger than the data.
_MOST_CLASSES_SHOWN = 1000


def split_figures(datamodule: FederatedDataModule, source: BatchSource) -> "Iterator[tuple[str, Figure]]":
    """Draws what can be shown of a data module's split; ``source`` has its clients' batches, on any device.

    Yields:
        ``split``, where there are class labels, ``sizes``, and ``samples``, where inputs are images; each with its
        figure.
    """
    split, labels, num_classes = datamodule.split, datamodule.labels, datamodule.num_classes
    if labels is not None and num_classes is not None and num_classes <= _MOST_CLASSES_SHOWN:
        yield "split", split_figure(count_labels(split, labels, num_classes), datamodule.class_names)
    yield "sizes", sizes_figure(split.sizes)
    if len(datamodule.input_shape or ()) == 3:
        # With a skew, one test set looks like the samples of all clients, the other like those of no client.
        tests = None if datamodule.skew is None else datamodule.test_dataloader()
        shown = tests if isinstance(tests, dict) else None
        sheet = sample_sheet(source, split, labels, datamodule.mean, datamodule.std, tests=shown)
        if sheet is not None:
            yield "samples", samples_figure(sheet)


def split_figure(class_counts: Any, class_names: Sequence[str] | None = None) -> "Figure":
    """Draws how many samples of each class each client holds.

    Args:
        class_counts: Samples of each client and class, shape (clients, classes), an array or one of scipy.sparse.
        class_names: Written at the axis, if there are at most 20.

    Returns:
        A figure without a window: save it with ``figure.savefig``. With more than 500 clients, a row is the mean over
        neighbouring clients.
    """
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = class_counts.shape
    rows = _merge_rows(class_counts)
    figure, axes = new_figure(min(3 + 0.3 * num_classes, 12), min(2 + 0.15 * len(rows), 10))
    image = axes.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=0,  # else small random differences would fill the whole scale
        extent=(-0.5, num_classes - 0.5, num_clients - 0.5, -0.5),
    )
    axes.set(xlabel="class", ylabel="client", title=f"{num_clients} clients × {num_classes} classes")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if class_names is not None and len(class_names) == num_classes <= _MAX_NAMES:
        longest = max(map(len, class_names))
        axes.set_xticks(range(num_classes), class_names, rotation=0 if longest < 4 else 90)
    figure.colorbar(image, ax=axes, label="samples")
    return figure


def sizes_figure(sizes: npt.NDArray[np.int64]) -> "Figure":
    """Draws how many clients hold how many samples, ``sizes`` of shape (clients,)."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(5, 3.5)
    # Every bar covers the same number of whole numbers.
    step = -(-(int(sizes.max()) - int(sizes.min()) + 1) // _MAX_BINS)
    edges = np.arange(int(sizes.min()), int(sizes.max()) + step + 1, step) - 0.5
    axes.hist(sizes, edges.tolist())
    empty = int((sizes == 0).sum())
    title = f"{len(sizes)} clients, {int(sizes.sum())} samples"
    axes.set(xlabel="samples", ylabel="clients", title=f"{title}, {empty} without any" if empty else title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def samples_figure(sheet: SampleSheet) -> "Figure":
    """Draws sample images, a row for each client and each test set."""
    rows, columns, height, width, _ = sheet.images.shape
    gap = max(1, height // 12)
    # One picture of all images, because drawing each in its own axes takes seconds.
    padded = np.pad(sheet.images, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=1)
    mosaic = padded.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), 3)
    figure, axes = new_figure(1 + 0.6 * columns, 0.4 + 0.6 * rows * height / width)
    axes.imshow(mosaic[:-gap, :-gap], interpolation="nearest")
    names = [*map(str, sheet.clients), *(f"test {name}" for name in sheet.tests)]
    axes.set_yticks(np.arange(rows) * (height + gap) + (height - 1) / 2, names)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("client")
    return figure


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """Makes a figure without a window, of this size in inches, with one pair of axes."""
    # pyplot would choose a window system and keep the figure in memory.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _merge_rows(counts: Any) -> npt.NDArray[np.float64]:
    """Averages neighbouring rows so that at most 500 are left, without the whole table of a sparse array."""
    from scipy.sparse import csr_array  # the import takes as long as a small run

    rows = np.arange(counts.shape[0])
    merged = rows // -(-len(rows) // _MAX_ROWS)
    sums = csr_array((np.ones(len(rows)), (merged, rows))) @ csr_array(counts)
    return np.asarray(sums.toarray() / np.bincount(merged)[:, None])
