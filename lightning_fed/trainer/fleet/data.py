"""The data of a node: its own clients, under the numbers that they have in the fleet."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.user_code import overrides
from lightning_fed.data.batch_sources import BatchSource, WrappedSource
from lightning_fed.data.split import Split
from lightning_fed.engines.fleet.data import WrappedData
from lightning_fed.errors import FederatedError, expect, expect_count
from lightning_fed.trainer.evaluation import named_loaders
from lightning_fed.trainer.fleet.held_out import OwnBatches, samples_of

__all__ = ["NodeData", "NumberedSource"]


class NumberedSource(WrappedSource):
    """Another source whose clients have other numbers here.

    Attributes:
        own_sizes: Samples of its own clients, shape (N,), 0 of all others.

    Args:
        source: The other source.
        places: The number there of each client that it has.
        sizes: Samples of all clients, shape (N,); those of its own are put in.
    """

    renumbers = True

    def __init__(self, source: BatchSource, places: Mapping[int, int], sizes: Sequence[int]) -> None:
        super().__init__(source)
        self.places, self.sizes = places, np.array(sizes, dtype=np.int64)
        self.own_sizes = np.zeros_like(self.sizes)
        self.own_sizes[list(places)] = self.sizes[list(places)] = np.asarray(source.sizes)[list(places.values())]

    @property
    def unaugmented(self) -> BatchSource:
        """The same without augmentation."""
        return NumberedSource(getattr(self.inner, "unaugmented", self.inner), self.places, self.sizes.tolist())

    def batches(self, client: int, order: Tensor, seed: int, batch_size: int | None = None) -> Iterator[Any]:
        """Yields a client's batches."""
        return self.read(self.places[client], order, seed, batch_size)

    def plan(self, client: int, order: Tensor, seed: int) -> tuple[Tensor, ...]:
        return super().plan(self.places[client], order, seed)

    def gather(self, *rows: Tensor) -> Any:
        """Gathers samples of several clients, by what ``plan`` returned."""
        inner: Any = self.inner
        return inner.gather(*rows)


class NodeData(WrappedData):
    """Wraps a data module whose client k is client ``clients[k]`` of the fleet, or one that has more than these.

    Attributes:
        num_classes: The classes that any client of the fleet has; None if labels are not known.
    """

    num_classes: int | None = None

    def __init__(self, source: Any, clients: Sequence[int]) -> None:
        super().__init__(source)
        expect(clients and len({*clients}) == len(clients), f"Expected the node's clients, each once, got {clients!r}.")
        self.clients = sorted(expect_count("clients", int(each), 0) for each in clients)
        self._given, nobody = list(clients), [0] * (max(self.clients) + 1)
        self._sizes = {"train": nobody, "held_out": nobody}  # of all clients of the fleet, once the server tells them

    def take_in(self, sizes: list[int], held_out: list[int], num_classes: int | None) -> None:
        """Takes over what the server knows of all clients of the fleet: their samples, shape (N,), and C."""
        self._sizes, self.num_classes = {"train": sizes, "held_out": held_out}, num_classes

    def _places(self, sizes: Any) -> dict[int, int]:
        """Returns the number that each client has in the data module."""
        own, given = len(sizes), self._given
        expect(
            own == len(given) or max(given) < own,
            f"Expected data of the {len(given)} clients {given[:5]} of this node, or of more, got {own}: change "
            "`clients` or `--data.num_clients`.",
        )
        return dict(zip(given, range(own) if own == len(given) else given, strict=True))

    def train_source(self) -> BatchSource:
        """Returns the source of the clients' batches, under their numbers in the fleet."""
        source = self.source.train_source()
        return NumberedSource(source, self._places(source.sizes), self._sizes["train"])

    def held_out_source(self, part: Literal["val", "test"]) -> BatchSource:
        """Returns the same of samples that the data hold out."""
        source = self.source.held_out_source(part)
        return NumberedSource(source, self._places(source.sizes), self._sizes["held_out"])

    @property
    def split(self) -> Split:
        """The samples of each client of the fleet, shape (N,); none of those elsewhere."""
        own = self.source.split
        places, nothing = self._places(own.sizes), np.empty(0, dtype=np.int64)
        rows = {client: own.index[own.offsets[at] : own.offsets[at + 1]] for client, at in places.items()}
        return Split.of([rows.get(client, nothing) for client in range(len(self._sizes["train"]))])

    def class_counts(self) -> Tensor | None:
        """Counts the samples of this node's clients and classes, shape (k, C); None if labels are not known."""
        labels, classes = (getattr(self.source, name, None) for name in ("labels", "num_classes"))
        if labels is None or classes is None:
            return None
        counts: Any = self.split.class_counts(labels, classes)[self.clients]
        return torch.from_numpy(counts.astype(np.int32))

    def held_out(self, kind: Literal["val", "test"]) -> dict[str, Any]:
        """Returns the sets of these clients by name: all of their own data, or what a larger one holds out of them."""
        if len(self.source.train_source().sizes) == len(self.clients):
            given = getattr(self.source, f"{kind}_dataloader")() if overrides(self.source, f"{kind}_dataloader") else []
            sets = named_loaders(given[0] if isinstance(given, list) and len(given) == 1 else given)
            return {name: loader for name, loader in sets.items() if samples_of(loader)}
        try:
            own = OwnBatches(self.held_out_source(kind), self.clients)
        except FederatedError:  # it has a set that belongs to no client
            return {}
        name = "clients" if kind == "test" and len(self.source.division.clients) else ""
        return {name: own} if own.num_samples else {}

    def val_dataloader(self) -> list[Any]:
        return []

    test_dataloader = val_dataloader
