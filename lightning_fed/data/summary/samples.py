"""Sample images of some clients, as the clients see them in training, and of test sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.data.sources import BatchSource, EvalLoader
from lightning_fed.data.split import Split

__all__ = ["SampleSheet", "choose_samples", "image_table", "images_of", "sample_sheet"]


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
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, Sequence) and len(batch):
        batch = batch[0]
    if not isinstance(batch, Tensor) or batch.ndim != 4 or batch.dtype == torch.int64 or min(batch.shape) == 0:
        return None
    return batch.detach().to("cpu", torch.float32)


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
