"""How samples are read and become batches, and the error if that fails."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.utils.data import Dataset, default_collate, get_worker_info
from typing_extensions import Self

from lightning_fed.core.seeding import MAX_SEED, isolated_streams, seed_generators, seed_host
from lightning_fed.core.user_code import Held
from lightning_fed.errors import FederatedError

__all__ = ["CheckedCollate", "Collate", "Loading", "Requests", "SeededReads", "close_workers"]

Collate: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Loading:
    """How samples become batches: options of a ``DataLoader``, of the same names."""

    batch_size: int = 32
    collate_fn: Collate | None = None
    drop_last: bool = False
    num_workers: int = 0
    worker_init_fn: Callable[[int], Any] | None = None

    @property
    def workers(self) -> dict[str, Any]:
        """Options of a data loader whose workers see the data set as it is when a pass begins, and end with it."""
        return {"num_workers": self.num_workers, "worker_init_fn": self.worker_init_fn}

    def changed(self, **options: Any) -> Self:
        """Returns a copy with the given options, except those that are None."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


class Requests:
    """The batches of a data loader's next pass, each as the seed of the pass, its number in it, and row numbers."""

    batches: Sequence[tuple[int, int, list[int]]] = ()

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        return iter(self.batches)


class SeededReads(Dataset[Any]):
    """Reads a whole batch under its own seed, in a worker or in the main process alike.

    The random generators that the data set and ``collate`` hold are seeded too. They are looked for after the first
    batch of each pass, which is read again with new ones: some make theirs as they are read.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._pass, self._generators = -1, Held(dataset, collate).generators

    def __getitems__(self, request: tuple[int, int, list[int]]) -> list[Any]:
        seed, number, rows = request
        samples = self._read(own := (seed + number) & MAX_SEED, rows)
        if seed != self._pass:
            self._pass, former = seed, [*map(id, self._generators)]
            self._generators = Held(self.dataset, self.collate).generators
            if [*map(id, self._generators)] != former:
                samples = self._read(own, rows)
        return samples

    def _read(self, seed: int, rows: list[int]) -> list[Any]:
        seed_generators(self._generators, seed)
        if get_worker_info() is not None:  # nobody else draws from its streams: `collate` goes on with them
            seed_host(seed)
        with isolated_streams(seed) if get_worker_info() is None else nullcontext():
            if callable(getattr(self.dataset, "__getitems__", None)):
                return list(self.dataset.__getitems__(rows))
            return [self.dataset[row] for row in rows]


def close_workers(loader: Any) -> None:
    """Ends the worker processes that a data loader keeps from pass to pass; its next pass starts new ones."""
    iterator: Any = getattr(loader, "_iterator", None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


class CheckedCollate:
    """Collates samples, with torch's own function if none is given; an error names the option to change if it fails."""

    def __init__(self, collate: Collate | None = None) -> None:
        self.collate = default_collate if collate is None else collate

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except FederatedError:
            raise
        except Exception as error:
            name = getattr(self.collate, "__name__", type(self.collate).__name__)
            said = " ".join(str(error).split()) or type(error).__name__
            raise FederatedError(
                f"Expected `--data.collate_fn` to make a batch of {len(samples)} samples, but {name} failed ({said}): "
                "give a function that takes a list of samples, for example one that pads them to equal lengths."
            ) from error
