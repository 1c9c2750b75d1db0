"""Batches of central validation and test sets, one or several."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader
from typing_extensions import Self

from lightning_fed.data.collation import CheckedCollate, Loading
from lightning_fed.data.inspection import AnyDataset, find_conversion, find_tensors, length
from lightning_fed.data.sources import EvalBatches, EvalLoader, EvalLoaders, SetBatches
from lightning_fed.errors import FederatedError

__all__ = ["JoinedBatches", "eval_loader", "expect_free_names", "join_tests", "num_samples", "worker_options"]


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
        """Number of batches."""
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


def join_tests(loaders: EvalLoaders, held_out: dict[str, EvalLoader]) -> dict[str, EvalLoader]:
    """Adds held-out sets (``clients``, ``unseen``) to the data's test sets; a single test set is named ``test``."""
    if isinstance(loaders, (list, tuple)):
        loaders = {f"test_{number}": loader for number, loader in enumerate(loaders)}
    named = loaders if isinstance(loaders, dict) else {"test": loaders}
    expect_free_names(named, held_out)
    return {**named, **held_out}


def expect_free_names(named: Iterable[str], held_out: Iterable[str]) -> None:
    """Refuses a test set of the data that has the name of a held-out one."""
    for name in set(named).intersection(held_out):
        option = "unseen_clients" if name == "unseen" else "client_test_fraction"
        raise FederatedError(
            f"Expected no test set named {name} beside the one that `--data.{option}` makes, but the data have "
            f"one: set `--data.{option} 0`, or rename theirs."
        )
