"""What every partitioner shares: the contract, the checks, clients with few samples, and steps without a loop."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.errors import FederatedError, expect_choice, expect_count

__all__ = ["MAX_DRAWS", "Owners", "Partitioner", "Reads", "TooSmall", "Values", "by_class", "class_codes", "deal"]

Reads: TypeAlias = Literal["nothing", "targets", "users"]
TooSmall: TypeAlias = Literal["redraw", "refuse", "allow"]
Values: TypeAlias = npt.NDArray[Any] | None  # a target or user of each sample
Owners: TypeAlias = npt.NDArray[np.int64]

MAX_DRAWS = 100  # draws of a split before "redraw" gives up


class Partitioner(ABC):
    """Base of all partitioners: a subclass says which client owns each sample.

    Args:
        min_samples: Fewest samples of a client, before some are held out. With 0 clients may be empty; empty clients
            are skipped when they are drawn.
        too_small: What to do when a client gets fewer: ``redraw`` draws the whole split again, up to 100 times;
            ``refuse`` ends with an error; ``allow`` accepts it.

    Attributes:
        reads: What the split depends on besides the counts and the seed. A partitioner that reads ``targets`` or
            ``users`` refuses data without them.
        sizes_vary: Whether another draw gives clients other sizes; if not, ``redraw`` is the same as ``refuse``.
    """

    reads: ClassVar[Reads] = "nothing"
    sizes_vary: ClassVar[bool] = True

    # Defaults for subclasses whose own constructor does not call this one.
    min_samples: int = 0
    too_small: TooSmall = "redraw"

    def __init__(self, min_samples: int = 0, too_small: TooSmall = "redraw") -> None:
        expect_count("--data.partitioner.min_samples", min_samples, least=0)
        expect_choice("--data.partitioner.too_small", too_small, get_args(TooSmall))
        self.min_samples, self.too_small = min_samples, too_small

    @abstractmethod
    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        """Says which client owns each sample.

        Args:
            targets: One target per sample, shape (num_samples,), None when the data has none; where ``reads`` is
                ``users``, one user per sample.
            num_samples: Training samples, at least ``num_clients``.
            num_clients: Clients, at least 1.
            generator: The only randomness to draw from.

        Returns:
            Client ids in [0, num_clients), shape (num_samples,).
        """

    def count_clients(self, values: Values, num_clients: int | None) -> int:
        """Returns the number of clients; a partitioner of natural clients finds it in the values that it reads."""
        if num_clients is None:
            raise FederatedError(
                f"Expected `--data.num_clients` to be a number for the partitioner {type(self).__name__}, got none: "
                "set it, or choose `--data.partitioner ByUser`, which makes a client of each user."
            )
        return num_clients

    def __call__(self, targets: Values, num_samples: int, num_clients: int, seed: int) -> list[npt.NDArray[np.int64]]:
        """Splits the samples over the clients; only ``seed`` makes it random. Other arguments are as in ``assign``.

        Returns:
            For each client the ascending indices of its samples, int64; each sample occurs exactly once.
        """
        self._check(targets, num_samples, num_clients)
        generator = numpy_generator_for(seed, Purpose.SPLIT)
        owner, sizes = self._draw(targets, num_samples, num_clients, generator)
        # A stable sort keeps each client's samples in ascending order; slices of one vector cost no copy per client.
        index = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        ends = np.cumsum(sizes).tolist()
        return [index[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _draw(
        self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Draws until no client is too small; all draws use one random stream."""
        draws = MAX_DRAWS if self.too_small == "redraw" and self.sizes_vary else 1
        for _ in range(draws):
            owner = np.asarray(self.assign(targets, num_samples, num_clients, generator))
            self._check_owner(owner, num_samples, num_clients)
            sizes = np.bincount(owner, minlength=num_clients)
            if self.too_small == "allow" or sizes.min() >= self.min_samples:
                return owner, sizes
        tried = "" if draws == 1 else f" in the last of {draws} draws"
        raise FederatedError(
            f"Expected at least {self.min_samples} samples for every client, got {sizes.min()} for client "
            f"{sizes.argmin()}{tried}: lower `--data.partitioner.min_samples` or `--data.num_clients`, choose a more "
            "even split, or set `--data.partitioner.too_small allow`."
        )

    def _check(self, targets: Values, num_samples: int, num_clients: int) -> None:
        expect_count("--data.num_clients", num_clients)
        if num_clients > num_samples:
            raise FederatedError(
                f"Expected `--data.num_clients` to be at most the number of training samples, {num_samples}, "
                f"got {num_clients}."
            )
        if self.too_small != "allow" and self.min_samples * num_clients > num_samples:
            raise FederatedError(
                f"Expected at least {self.min_samples} samples for each of {num_clients} clients, got {num_samples} "
                "samples in all: lower `--data.partitioner.min_samples` or `--data.num_clients`, or set "
                "`--data.partitioner.too_small allow`."
            )
        self._check_values(targets, num_samples)

    def _check_values(self, values: Values, num_samples: int) -> None:
        if values is None and self.reads != "nothing":
            raise FederatedError(
                f"Expected {self.reads} for the partitioner {type(self).__name__}, but the training data has none: set "
                f"`--data.{self.reads}`, give the data set an attribute `{self.reads}`, or choose "
                "`--data.partitioner IID`."
            )
        option = "users" if self.reads == "users" else "targets"
        if values is not None and values.shape != (num_samples,):
            raise FederatedError(
                f"Expected `--data.{option}` to hold one value for each of the {num_samples} training samples, "
                f"got shape {values.shape}."
            )
        if self.reads == "targets" and values is not None and values.dtype.kind == "f":
            wrong = values[~(np.isfinite(values) & (values == np.floor(values)))]
            if len(wrong):
                raise FederatedError(
                    f"Expected class labels (whole numbers or strings) for the partitioner {type(self).__name__}, got "
                    f"{wrong[0]}: change `--data.targets`, or choose `--data.partitioner IID`, which reads none."
                )

    def _check_owner(self, owner: npt.NDArray[Any], num_samples: int, num_clients: int) -> None:
        integers = np.issubdtype(owner.dtype, np.integer)
        if owner.shape != (num_samples,) or not integers or owner.min() < 0 or owner.max() >= num_clients:
            raise FederatedError(
                f"Expected `--data.partitioner` {type(self).__name__} to assign a client id in [0, {num_clients}) to "
                f"each of the {num_samples} samples, got {owner.dtype} values of shape {owner.shape}."
            )


def class_codes(targets: npt.NDArray[Any] | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Numbers the classes of targets, shape (samples,), in ascending order of their labels.

    Returns:
        Samples of each class, shape (classes,), and the class of each sample, shape (samples,), of the smallest integer
        type, which a stable sort then orders in linear time.
    """
    _, codes, counts = np.unique(np.asarray(targets), return_inverse=True, return_counts=True)
    return counts, codes.astype(np.min_scalar_type(len(counts)))


def by_class(codes: npt.NDArray[Any], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Returns all sample numbers, class after class, in random order within a class; shape (samples,)."""
    shuffled = generator.permutation(len(codes))
    return shuffled[np.argsort(codes[shuffled], kind="stable")]


def deal(shares: npt.NDArray[np.float64], num_samples: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Cuts a row of samples into parts of given shares.

    A part of share p gets floor(p m) or ceil(p m) of m samples, p m in expectation. This is systematic sampling: m
    evenly spaced points with one random offset. Rounding all boundaries down would always favour the last parts.

    Args:
        shares: Shares of the parts, at least 0, not all 0, shape (parts,).
        num_samples: m.
        generator: What the offset is drawn from.

    Returns:
        The part of each sample, ascending, shape (m,).
    """
    edges = np.cumsum(shares)
    points = (np.arange(num_samples) + generator.random()) * (edges[-1] / max(num_samples, 1))
    # A point that rounding has put beyond the end goes to the last part with a share above 0.
    return np.asarray(np.minimum(np.searchsorted(edges, points, side="right"), np.flatnonzero(shares)[-1]))
