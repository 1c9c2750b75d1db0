"""Makes a data module with clients from data without clients: whatever Lightning's ``fit`` takes."""

from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from lightning_fed.core import is_news
from lightning_fed.core.user_code import overrides
from lightning_fed.data.batch_sources import BatchSource
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.source_module import GivenLoaders, is_datamodule
from lightning_fed.errors import FederatedError

__all__ = ["adopt"]


class AdoptedData(FederatedDataModule):
    """Data given without clients: they are split over the default number of clients, and the user is told so."""

    def train_source(self) -> BatchSource:
        source = super().train_source()
        name = None if self._source is None else self._source.name
        if name is not None and is_news("split", (name, len(source.sizes), self.split_by)):
            rank_zero_info(
                f"The training data of {name} are split over {len(source.sizes)} clients "
                f"({self.split_by}): to choose how, give a FederatedDataModule(source=..., "
                "num_clients=..., partitioner=...), on the command line `--data FederatedDataModule --data.source ...`."
            )
        return source


def adopt(datamodule: Any, model: Any = None, **loaders: Any) -> LightningDataModule | None:
    """Makes a data module with clients from the arguments of a trainer's method.

    ``loaders`` are named ``train``, ``val``, ``test`` or ``predict``. The first one belongs to the called method, and
    may be a data module instead. Without a data module, missing loaders are the model's own.

    Returns:
        The data module itself if it has clients, or no training data to split; None if there are no data.
    """
    given = {name: loader for name, loader in loaders.items() if loader is not None}
    if datamodule is None and given and is_datamodule(first := next(iter(given.values()))):
        datamodule = first
        given.pop(next(iter(given)))
    if datamodule is None:
        source = GivenLoaders(model, **given)
        return AdoptedData(source=source) if overrides(source, f"{next(iter(loaders), 'train')}_dataloader") else None
    if given:
        raise FederatedError(
            f"Expected either a datamodule or data loaders, got {type(datamodule).__name__} and {', '.join(given)} "
            "loaders: leave one out."
        )
    if hasattr(datamodule, "train_source") or not overrides(datamodule, "train_dataloader"):
        return datamodule  # type: ignore[no-any-return]  # the trainer refuses anything else
    return AdoptedData(source=datamodule)
