"""The base of data modules that bring their own data."""

from abc import ABC, abstractmethod
from inspect import signature
from typing import Any

from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.errors import FederatedError

__all__ = ["BundledDataModule"]


class BundledDataModule(FederatedDataModule, ABC):
    """Base of data modules that bring their own data sets: a subclass writes ``load_datasets``.

    Args:
        **kwargs: Every option of ``FederatedDataModule`` except the data sets, the targets, the users and the source.
    """

    def __init__(self, **kwargs: Any) -> None:
        known = signature(FederatedDataModule.__init__).parameters
        for name in kwargs.keys() - known:
            raise FederatedError(f"Expected only options that {type(self).__name__} has, got `{name}`: leave it out.")
        super().__init__(
            None, val_dataset=None, test_dataset=None, predict_dataset=None, targets=None, users=None,
            source=None, **kwargs,
        )  # fmt: skip

    @abstractmethod
    def load_datasets(self) -> Datasets:
        """Returns the data sets; called once. Downloads belong in ``prepare_data``."""
