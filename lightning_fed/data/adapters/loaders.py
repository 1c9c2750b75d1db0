"""What is read from a data loader without clients: its samples, and how they become batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from lightning_fed.data.adapters.clients import ClientDatasets, are_datasets
from lightning_fed.data.collation import Loading
from lightning_fed.data.inspection import AnyDataset, length
from lightning_fed.errors import FederatedError

__all__ = ["read_loader"]

_PLAIN = (SequentialSampler, RandomSampler)


def read_loader(loader: Any, owner: str) -> tuple[AnyDataset, Loading]:
    """Reads a training loader, or a list or dict of loaders, one for each client; messages name its ``owner``.

    Returns:
        The data set, restricted to the rows of a subset sampler, and how its samples become batches.
    """
    if are_datasets(loader):
        return _read_clients(loader, owner)
    if not isinstance(loader, DataLoader):
        several = isinstance(loader, (CombinedLoader, list, tuple, Mapping))
        hint = "give a list of data sets, one for each client" if several else "wrap its data in one"
        raise FederatedError(
            f"Expected the training loader of {owner} to be a torch DataLoader, whose data set is split over clients, "
            f"got {type(loader).__name__}: {hint}, or give the data set as `--data.train_dataset`."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise FederatedError(
            f"Expected the data set of {owner}'s training loader to have numbered samples, which are split over "
            f"clients, got {type(loader.dataset).__name__}, a stream: give it `__getitem__` and `__len__`, or give a "
            "list of data sets, one for each client."
        )
    loading, sampler = _loading(loader, owner)
    return _sampled(loader.dataset, sampler, owner), loading


def _read_clients(loaders: Any, owner: str) -> tuple[AnyDataset, Loading]:
    """Reads the loaders or data sets of clients."""
    parts, loadings = [], []
    for client, loader in enumerate(loaders.values() if isinstance(loaders, Mapping) else loaders):
        part, loading = loader, Loading()
        if isinstance(loader, DataLoader):
            loading, sampler = _loading(loader, f"client {client} of {owner}")
            stream = isinstance(loader.dataset, IterableDataset)
            part = loader.dataset if stream else _sampled(loader.dataset, sampler, owner)
        parts.append(part)
        loadings.append(loading)
    sizes = sorted({loading.batch_size for loading in loadings})
    if len(sizes) > 1:
        raise FederatedError(
            f"Expected the loaders of {owner}'s clients to have one batch size, got {', '.join(map(str, sizes))}: give "
            "them the same, or their data sets and a `--data.batch_size`."
        )
    return ClientDatasets(parts), loadings[0]


def _loading(loader: DataLoader[Any], owner: str) -> tuple[Loading, Any]:
    """Returns how samples become batches, and the sampler."""
    batches: Any = loader.batch_sampler
    if batches is None:
        raise FederatedError(
            f"Expected the training loader of {owner} to have a `batch_size`, got none, so that its data set makes the "
            "batches itself: give a data set of single samples."
        )
    size, drop_last = getattr(batches, "batch_size", None), bool(getattr(batches, "drop_last", False))
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler:
        raise FederatedError(
            f"Expected the training loader of {owner} to make batches by `batch_size`, got its own "
            f"{type(batches).__name__}, whose choice of samples is not used, as each client goes through its own "
            "samples in random order: give the loader a `batch_size` instead."
        )
    loading = Loading().changed(
        batch_size=size if isinstance(size, int) else None,
        # A loader without a `collate_fn` shows torch's default one.
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        drop_last=drop_last,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
    )
    return loading, sampler


def _sampled(dataset: AnyDataset, sampler: Any, owner: str) -> AnyDataset:
    """Keeps the rows that a sampler takes; warns if its order or frequencies are not used."""
    rows = sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler
    if isinstance(rows, Sequence) or rows is not sampler:
        return Subset(dataset, [int(row) for row in rows])
    is_whole = isinstance(sampler, _PLAIN) and len(sampler) == length(dataset, "--data.train_dataset")
    if not (is_whole or isinstance(sampler, DistributedSampler)) or getattr(sampler, "replacement", False):
        rank_zero_warn(
            f"The {type(sampler).__name__} of {owner}'s training loader is not used: each client goes through its own "
            "samples in random order."
        )
    return dataset
