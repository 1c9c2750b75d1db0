"""What a data loader that knows nothing of clients tells: its samples, and how they become batches."""

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

from lightning_fed.data.collation import Loading
from lightning_fed.data.inspection import AnyDataset
from lightning_fed.errors import FederatedError

__all__ = ["read_loader"]

_PLAIN = (SequentialSampler, RandomSampler, DistributedSampler)


def read_loader(loader: Any, owner: str) -> tuple[AnyDataset, Loading]:
    """Takes a training loader apart.

    Args:
        loader: The loader.
        owner: Whose it is, in words.

    Returns:
        The data set, restricted to what a sampler of some rows leaves, and how its samples become batches.

    Raises:
        FederatedError: If its samples cannot be split over clients.
    """
    if not isinstance(loader, DataLoader):
        hint = "give the loaders one by one" if isinstance(loader, CombinedLoader) else "wrap its data in one"
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
    batches: Any = loader.batch_sampler
    if batches is None:
        raise FederatedError(
            f"Expected the training loader of {owner} to have a `batch_size`, got none, so that its data set makes the "
            "batches itself: give a data set of single samples."
        )
    size, drop_last = getattr(batches, "batch_size", None), bool(getattr(batches, "drop_last", False))
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler:
        sampler = batches
    loading = Loading().changed(
        batch_size=size if isinstance(size, int) else None,
        # A loader of the default one has it as its own.
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        drop_last=drop_last,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
    )
    return _sampled(loader.dataset, sampler, owner), loading


def _sampled(dataset: AnyDataset, sampler: Any, owner: str) -> AnyDataset:
    """Keeps which rows a sampler takes; says that its order and frequencies are the clients' own."""
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(dataset, [int(row) for row in sampler.indices])
    if not isinstance(sampler, _PLAIN) or getattr(sampler, "replacement", False):
        rank_zero_warn(
            f"The {type(sampler).__name__} of {owner}'s training loader is not used: each client goes through its own "
            "samples in random order."
        )
    return dataset
