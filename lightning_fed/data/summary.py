"""The data and their split in a few lines of text, and as pictures of classes, sizes and samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.data.batch_sources import BatchSource, EvalLoader, num_samples
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.inspection import first_part
from lightning_fed.data.split import Split, count_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "SampleSheet", "choose_samples", "facts", "image_table", "images_of", "new_figure", "overview", "sample_sheet",
    "samples_figure", "sizes_figure", "split_figure", "split_figures",
]  # fmt: skip

_MAX_ROWS, _MAX_NAMES, _MAX_BINS = 500, 20, 40
# With more classes a picture of clients by classes shows nothing, and its table can be larger than the data.
_MOST_CLASSES_SHOWN = 1000
_MEBIBYTE = 2**20


def overview(datamodule: FederatedDataModule) -> str:
    """Describes data and split, one named fact per line."""
    lines = facts(datamodule)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name:<{width}}{line}" for name, line in lines.items())


def facts(datamodule: FederatedDataModule) -> dict[str, str]:
    """Returns facts about data and split, by name."""
    figures: dict[str, Any] = datamodule.split_summary()
    shape, classes = datamodule.input_shape, datamodule.num_classes
    described = "without a shape" if shape is None else " × ".join(map(str, shape)) or "a number"
    lines = {
        "data": f"{type(datamodule.source or datamodule).__name__}, split by {datamodule.split_by}",
        "input": described if classes is None else f"{described}, {classes} classes",
        "clients": f"{figures['clients']}, {figures['clients_empty'] or 'none'} of them empty",
        "training samples": f"{figures['samples']}",
        "samples per client": _spread(figures, "samples_per_client"),
    }
    if "label_entropy_mean" in figures:
        lines["classes per client"] = _spread(figures, "classes_per_client")
        lines["label entropy"] = (
            f"{figures['label_entropy_mean']:.3f} bits, mean over clients; {figures['label_entropy_pooled']:.3f} for "
            "all together"
        )
    if "label_divergence_mean" in figures:
        pairs = figures["label_divergence_pairs"]
        holding = figures["clients"] - figures["clients_empty"]
        sampled = "" if pairs == holding * (holding - 1) // 2 else ", drawn at random"
        lines["label divergence"] = (
            f"{figures['label_divergence_mean']:.3f} bits, Jensen-Shannon, mean over {pairs} pairs of clients{sampled}"
        )
    lines |= _evaluation(datamodule)
    memory = datamodule.memory
    lines["memory"] = "read one by one" if memory is None else f"{memory / _MEBIBYTE:.1f} MiB of training tensors"
    return lines | {"hash": datamodule.split_hash}


def _spread(figures: dict[str, Any], name: str) -> str:
    """Describes a number by its smallest, median and largest value."""
    low, median, high = (figures[f"{name}_{which}"] for which in ("min", "median", "max"))
    return f"{low} to {high}, median {median:g}" if low < high else f"{low}"


def _evaluation(datamodule: FederatedDataModule) -> dict[str, str]:
    """Counts the samples of validation and test sets."""
    lines = {}
    for name, loaders in (("validation", datamodule.val_dataloader()), ("test", datamodule.test_dataloader())):
        if isinstance(loaders, list):
            loaders = {str(number): loader for number, loader in enumerate(loaders)}
        named = loaders if isinstance(loaders, dict) else {"": loaders}
        for part, loader in named.items():
            known = hasattr(loader, "num_samples") or hasattr(getattr(loader, "dataset", None), "__len__")
            lines[f"{name} {part}".strip()] = f"{num_samples(loader)} samples" if known else f"{len(loader)} batches"
    return lines


@dataclass(frozen=True)
class SampleSheet:
    """Images of some clients, and of test sets.

    Attributes:
        clients: Ids of the clients in the first rows.
        images: Brightness or colours in [0, 1], shape (rows, columns, H, W, 3), float32; white where a client has fewer
            samples than there are columns.
        tests: Names of the test sets in the rows after those.
    """

    clients: npt.NDArray[np.int64]
    images: npt.NDArray[np.float32]
    tests: tuple[str, ...] = ()


def sample_sheet(
    source: BatchSource,
    split: Split,
    labels: npt.NDArray[Any] | None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    rows: int = 8,
    columns: int = 10,
    tests: Mapping[str, EvalLoader] | None = None,
) -> SampleSheet | None:
    """Reads samples of clients spread evenly over all that have any.

    They are read as in training, so colours, rotations and augmentations show. This touches no random stream of a run,
    and the same split shows the same samples.

    Args:
        source: The clients' batches.
        split: Which rows of the training set each client owns.
        labels: A label for each row of the training set, to show as many of a client's classes as possible, in the
            order of their labels.
        mean: What was subtracted from each channel, to undo that; if not given, the sheet is stretched to [0, 1].
        std: What each channel was then divided by.
        rows: Number of clients to show.
        columns: Number of samples of each.
        tests: Batches of test sets by name; each has a row of images, if they are of the clients' shape.

    Returns:
        The sheet, None if the first part of a batch is no image of shape (B, C, H, W).
    """
    held = np.flatnonzero(split.sizes)
    clients = held[np.unique(np.linspace(0, len(held) - 1, min(rows, len(held))).round().astype(np.int64))]
    batches: list[Tensor] = []
    for client in clients.tolist():
        order = choose_samples(split, labels, client, columns)
        (batch,) = source.batches(client, order, seed=client, batch_size=columns)
        images = images_of(batch)
        if images is None or (batches and images.shape[1:] != batches[0].shape[1:]):
            return None
        batches.append(images)
    if not batches:
        return None
    found = ((name, _some_images(loader, columns)) for name, loader in (tests or {}).items())
    shown = {name: images for name, images in found if images is not None and images.shape[1:] == batches[0].shape[1:]}
    table = image_table([*batches, *shown.values()], columns, mean, std)
    return SampleSheet(clients, table, tuple(shown))


def _some_images(loader: EvalLoader, count: int) -> Tensor | None:
    """Reads images spread over the first batch of a test set, shape (at most count, C, H, W); None if it has none."""
    with torch.random.fork_rng(devices=[]):  # a data loader draws a seed for its workers
        images = images_of(next(iter(loader), None))
    return None if images is None else images[torch.linspace(0, len(images) - 1, min(count, len(images))).long()]


def choose_samples(split: Split, labels: npt.NDArray[Any] | None, client: int, count: int) -> Tensor:
    """Chooses samples of a client at random: one of each of its classes, then a second of each, and so on.

    Returns:
        Places in the client's part of the split, in the order of their labels, shape (at most count,), int64.
    """
    rows = split.index[split.offsets[client] : split.offsets[client + 1]]
    places = np.random.default_rng(client).permutation(len(rows))
    if labels is None:
        return torch.from_numpy(places[:count])
    places = places[np.argsort(labels[rows[places]], kind="stable")]
    _, starts, sizes = np.unique(labels[rows[places]], return_index=True, return_counts=True)
    turn = np.arange(len(rows)) - np.repeat(starts, sizes)
    return torch.from_numpy(places[np.sort(np.argsort(turn, kind="stable")[:count])])


def images_of(batch: Any) -> Tensor | None:
    """Returns the images of a batch, shape (B, C, H, W), float32 on the CPU; None if its first part is none."""
    images = first_part(batch)
    if not isinstance(images, Tensor) or images.ndim != 4 or images.dtype == torch.int64 or min(images.shape) == 0:
        return None
    return images.detach().to("cpu", torch.float32)


def image_table(
    batches: list[Tensor], columns: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> npt.NDArray[np.float32]:
    """Arranges images as the colours of a picture, shape (rows, columns, H, W, 3)."""
    shown = _in_range(torch.cat(batches), mean, std).movedim(1, -1)
    channels = shown.shape[-1]
    if channels == 2:
        shown = torch.cat([shown, torch.zeros_like(shown[..., :1])], dim=-1)  # red and green
    elif channels == 1 or channels > 4:
        shown = shown.mean(dim=-1, keepdim=True).expand(*shown.shape[:-1], 3)
    table = torch.ones(len(batches), columns, *shown.shape[1:3], 3)
    parts = torch.split(shown[..., :3], [len(batch) for batch in batches])
    for row, images in zip(table, parts, strict=True):
        row[: len(images)] = images
    return np.asarray(table.numpy())


def _in_range(images: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Undoes the normalisation; if it is unknown, or more than that was done, stretches images to [0, 1]."""
    channels = images.shape[1]
    if mean is not None and std is not None and len(mean) in (1, channels) and len(std) in (1, channels):
        original = images * torch.tensor(std).reshape(-1, 1, 1) + torch.tensor(mean).reshape(-1, 1, 1)
    else:
        original = images
    low, high = original.min(), original.max()
    if low >= -0.01 and high <= 1.01:
        return original.clamp(0, 1)
    return (original - low) / (high - low).clamp(min=1e-12)


def split_figures(datamodule: FederatedDataModule, source: BatchSource) -> "Iterator[tuple[str, Figure]]":
    """Draws what can be shown of a data module's split; ``source`` has its clients' batches, on any device.

    Yields:
        ``split``, where there are class labels, ``sizes``, and ``samples``, where inputs are images; each with its
        figure.
    """
    split, labels, num_classes = datamodule.split, datamodule.labels, datamodule.num_classes
    if labels is not None and num_classes is not None and num_classes <= _MOST_CLASSES_SHOWN:
        counts = count_labels(split, labels, num_classes)
        yield "split", split_figure(counts, datamodule.class_names, datamodule.client_names)
    yield "sizes", sizes_figure(split.sizes)
    if len(datamodule.input_shape or ()) == 3:
        # With a skew, one test set looks like the samples of all clients, the other like those of no client.
        tests = None if datamodule.skew is None else datamodule.test_dataloader()
        shown = tests if isinstance(tests, dict) else None
        sheet = sample_sheet(source, split, labels, datamodule.mean, datamodule.std, tests=shown)
        if sheet is not None:
            yield "samples", samples_figure(sheet, datamodule.client_names)


def split_figure(
    class_counts: Any, class_names: Sequence[str] | None = None, client_names: Sequence[str] | None = None
) -> "Figure":
    """Draws how many samples of each class each client holds.

    Args:
        class_counts: Samples of each client and class, shape (clients, classes), an array or one of scipy.sparse.
        class_names: Written at the axis, if there are at most 20.
        client_names: The same.

    Returns:
        A figure without a window: save it with ``figure.savefig``. With more than 500 clients, a row is the mean over
        neighbouring clients.
    """
    num_clients, num_classes = class_counts.shape
    rows = _merge_rows(class_counts)
    figure, axes = new_figure(min(3 + 0.3 * num_classes, 12), min(2 + 0.15 * len(rows), 10))
    extent = (-0.5, num_classes - 0.5, num_clients - 0.5, -0.5)
    # Without `vmin` small random differences would fill the whole scale.
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, extent=extent)
    axes.set(xlabel="class", ylabel="client", title=f"{num_clients} clients × {num_classes} classes")
    _count_in_whole_numbers(axes)
    if class_names is not None and len(class_names) == num_classes <= _MAX_NAMES:
        longest = max(map(len, class_names))
        axes.set_xticks(range(num_classes), class_names, rotation=0 if longest < 4 else 90)
    if client_names is not None and num_clients <= _MAX_NAMES:
        axes.set_yticks(range(num_clients), client_names)
    figure.colorbar(image, ax=axes, label="samples")
    return figure


def sizes_figure(sizes: npt.NDArray[np.int64]) -> "Figure":
    """Draws how many clients hold how many samples, ``sizes`` of shape (clients,)."""
    figure, axes = new_figure(5, 3.5)
    # Every bar covers the same number of whole numbers.
    step = -(-(int(sizes.max()) - int(sizes.min()) + 1) // _MAX_BINS)
    edges = np.arange(int(sizes.min()), int(sizes.max()) + step + 1, step) - 0.5
    axes.hist(sizes, edges.tolist())
    empty = int((sizes == 0).sum())
    title = f"{len(sizes)} clients, {int(sizes.sum())} samples"
    axes.set(xlabel="samples", ylabel="clients", title=f"{title}, {empty} without any" if empty else title)
    _count_in_whole_numbers(axes)
    return figure


def _count_in_whole_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def samples_figure(sheet: SampleSheet, client_names: Sequence[str] | None = None) -> "Figure":
    """Draws sample images, a row for each client and each test set."""
    rows, columns, height, width, _ = sheet.images.shape
    gap = max(1, height // 12)
    # One picture of all images, because drawing each in its own axes takes seconds.
    padded = np.pad(sheet.images, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=1)
    mosaic = padded.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), 3)
    figure, axes = new_figure(1 + 0.6 * columns, 0.4 + 0.6 * rows * height / width)
    axes.imshow(mosaic[:-gap, :-gap], interpolation="nearest")
    clients = (str(client) if client_names is None else client_names[client] for client in sheet.clients)
    names = [*clients, *(f"test {name}" for name in sheet.tests)]
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
