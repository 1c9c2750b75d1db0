"""The data of a server whose clients are at nodes."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lightning_fed.core.user_code import TRANSFER_HOOKS, overrides
from lightning_fed.data.split import Split
from lightning_fed.engines.fleet.census import Census, Fleet
from lightning_fed.errors import FederatedError, expect

__all__ = ["FleetData", "WrappedData"]


def _passed_on(name: str) -> Callable[..., Any]:
    """Makes a method that calls that of the wrapped data, if they have one of their own."""

    def call(self: Any, *args: Any) -> Any:
        return getattr(self.source, name)(*args) if overrides(self.source, name) else []

    return call


class WrappedData(LightningDataModule):
    """A data module around another, in which all is looked up that it has not itself."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        vars(self).update({hook: getattr(source, hook) for hook in TRANSFER_HOOKS if overrides(source, hook)})

    def __getattr__(self, name: str) -> Any:
        """Looks up what models and callbacks ask for."""
        if name.startswith("_") or "source" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)

    def setup(self, stage: str) -> None:
        self.source.trainer = self.trainer
        self.source.setup(stage)

    prepare_data, teardown, on_exception = map(_passed_on, ("prepare_data", "teardown", "on_exception"))
    val_dataloader, test_dataloader, predict_dataloader = (
        _passed_on(f"{kind}_dataloader") for kind in ("val", "test", "predict")
    )


class FleetSource:
    """The sizes of clients whose batches are with nodes."""

    reads_are_seeded = False

    def __init__(self, sizes: npt.NDArray[np.int64], census: Census) -> None:
        self.sizes, self.batch_size, self.drop_last = sizes, census.batch_size, census.drop_last

    def to(self, device: torch.device | str) -> "FleetSource":
        """Returns itself: there is nothing to move."""
        return self

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Refuses to read what is not here."""
        raise FederatedError(
            f"Expected nothing on the server to read batches of clients, got a read of client {client}, whose samples "
            "are with a node: leave out the callback, or train without a fleet."
        )


class FleetData(WrappedData):
    """What nodes say of their clients, around a data module of the server's own for evaluation.

    Attributes:
        split: The samples of each client, shape (N,), numbered in an order of its own.
        labels: The class of each; None if a node knows none.
        num_classes: C.
    """

    labels: npt.NDArray[Any] | None = None
    num_classes: int | None = None
    client_names: None = None

    def __init__(self, fleet: Fleet, source: LightningDataModule | None) -> None:
        super().__init__(LightningDataModule() if source is None else source)
        expect(
            isinstance(self.source, LightningDataModule),
            f"Expected data to evaluate on, if any, on a server of nodes, got {type(source).__name__}, to train on: "
            "give it to a Node.",
        )
        self._fleet = fleet  # a run is the same over another one

    def setup(self, stage: str) -> None:
        """Asks the nodes who is there when a run begins."""
        if stage == "fit":
            self.census = Census(self._fleet.hello())
            counts, sizes = self.census.classes, self.census.sizes
            if counts is not None:  # in some order, as no more is known
                self.labels = np.concatenate([np.repeat(np.arange(len(row)), row) for row in counts])
                self.num_classes, sizes = counts.shape[1], counts.sum(axis=1)
            self.split = Split(np.arange(sizes.sum()), np.concatenate([[0], np.cumsum(sizes)]))
        super().setup(stage)

    @property
    def split_hash(self) -> str:
        """Names the clients by their samples and classes, for a run that goes on."""
        known = b"" if self.labels is None else self.labels.tobytes()
        return sha256(self.split.offsets.tobytes() + known).hexdigest()

    def split_summary(self) -> dict[str, int | float | str]:
        """Describes the clients in a few numbers."""
        return self.split.summary() | {"hash": self.split_hash}

    def train_source(self) -> FleetSource:
        """Returns the clients' sizes."""
        return FleetSource(self.census.sizes, self.census)

    def held_out_source(self, part: str) -> FleetSource:
        """Returns the sizes of what nodes hold out of each client."""
        return FleetSource(self.census.held_out, self.census)
