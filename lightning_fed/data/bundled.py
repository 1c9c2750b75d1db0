"""Base of data modules that bring their own data sets."""

from abc import ABC, abstractmethod
from typing import Any

from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.loading import Datasets

__all__ = ["BundledDataModule"]


class BundledDataModule(FederatedDataModule, ABC):
    """Base of data modules that bring their own data sets: a subclass writes ``load_datasets``.

    Args:
        **kwargs: Every option of ``FederatedDataModule`` except the data sets, the targets and the users.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            train_dataset=None,
            val_dataset=None,
            test_dataset=None,
            predict_dataset=None,
            targets=None,
            users=None,
            **kwargs,
        )

    @abstractmethod
    def load_datasets(self) -> Datasets:
        """Returns the data sets, called once; what must be fetched first belongs in ``prepare_data``."""
