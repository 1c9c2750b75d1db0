"""How samples become batches, and the error if that fails."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.utils.data import default_collate
from typing_extensions import Self

from lightning_fed.errors import FederatedError

__all__ = ["CheckedCollate", "Collate", "Loading"]

Collate: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Loading:
    """How samples become batches: options of a ``DataLoader``, of the same names."""

    batch_size: int = 32
    collate_fn: Collate | None = None
    drop_last: bool = False
    num_workers: int = 0
    worker_init_fn: Callable[[int], Any] | None = None

    def changed(self, **options: Any) -> Self:
        """Returns a copy with the given options, except those that are None."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


class CheckedCollate:
    """Collates samples, with torch's own function if none is given; an error names the option to change if it fails."""

    def __init__(self, collate: Collate | None = None) -> None:
        self.collate = default_collate if collate is None else collate

    def __call__(self, samples: list[Any]) -> Any:
        """Makes a batch."""
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
