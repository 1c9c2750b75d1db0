"""Batches of central validation and test sets, one or several."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader
from typing_extensions import Self

from lightning_fed.data.collation import CheckedCollate, Loading
from lightning_fed.data.inspection import AnyDataset, find_conversion, find_tensors, length
from lightning_fed.data.sources import EvalBatches, EvalLoader, SetBatches

__all__ = ["JoinedBatches", "eval_loader", "num_samples", "worker_options"]


class JoinedBatches:
    """The batches of several sets, one set after the other; the last batch of each may be short."""

    def __init__(self, loaders: Sequence[EvalLoader]) -> None:
        self._loaders = list(loaders)
        self._device: torch.device | None = None

    @property
    def num_samples(self) -> int:
        """Samples in all sets together."""
        return sum(map(num_samples, self._loaders))

    def __len__(self) -> int:
        return sum(map(len, self._loaders))

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the sets as they are."""
        for loader in self._loaders:
            for batch in loader:
                yield move_data_to_device(batch, self._device) if self._device is not None else batch

    def to(self, device: torch.device | str) -> Self:
        """Makes batches arrive on a device; returns itself."""
        self._device = torch.device(device)
        for loader in self._loaders:
            if hasattr(loader, "to"):  # a data loader's batches move one by one
                loader.to(device)
        return self


def eval_loader(dataset: AnyDataset, batch_size: int, in_memory: bool, loading: Loading) -> SetBatches:
    """Returns slices of data in memory, else a data loader that does not shuffle."""
    tensors = find_tensors(dataset) if in_memory and loading.collate_fn is None else None
    if tensors is not None:
        return EvalBatches(tensors, batch_size, find_conversion(dataset))
    return DataLoader(dataset, batch_size, collate_fn=CheckedCollate(loading.collate_fn), **worker_options(loading))


def worker_options(loading: Loading) -> dict[str, Any]:
    """Options of a data loader whose workers see the data set as it is when a pass begins, and end with it."""
    return {"num_workers": loading.num_workers, "worker_init_fn": loading.worker_init_fn}


def num_samples(loader: Any) -> int:
    """Returns the number of samples of a central set, also if a data loader reads it."""
    return int(loader.num_samples) if hasattr(loader, "num_samples") else length(loader.dataset, "--data")
