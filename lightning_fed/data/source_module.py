"""Data modules without clients, and data loaders without a data module: their samples, and how these become batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from lightning.pytorch import LightningDataModule
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

from lightning_fed.core.seeding import isolated_streams
from lightning_fed.core.user_code import overrides
from lightning_fed.data.batch_sources import EvalLoaders
from lightning_fed.data.collation import Loading
from lightning_fed.data.containers import ClientDatasets, are_datasets
from lightning_fed.data.inspection import AnyDataset, expect_one_meaning, length, name_kind
from lightning_fed.errors import FederatedError

__all__ = ["GivenLoaders", "SourceModule", "expect_source", "is_datamodule", "read_loader"]

EvalStage: TypeAlias = Literal["val", "test", "predict"]
_STAGES = {"val": ("fit", "validate"), "test": ("test",), "predict": ("predict",)}
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
    parts, loadings = {}, []
    for client, loader in loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders):
        part, loading = loader, Loading()
        if isinstance(loader, DataLoader):
            loading, sampler = _loading(loader, f"client {client} of {owner}")
            stream = isinstance(loader.dataset, IterableDataset)
            part = loader.dataset if stream else _sampled(loader.dataset, sampler, owner)
        parts[client] = part
        loadings.append(loading)
    sizes = sorted({loading.batch_size for loading in loadings})
    if len(sizes) > 1:
        raise FederatedError(
            f"Expected the loaders of {owner}'s clients to have one batch size, got {', '.join(map(str, sizes))}: give "
            "them the same, or their data sets and a `--data.batch_size`."
        )
    return ClientDatasets(parts if isinstance(loaders, Mapping) else [*parts.values()]), loadings[0]


def _loading(loader: DataLoader[Any], owner: str) -> tuple[Loading, Any]:
    """Returns how samples become batches, and the sampler."""
    batches: Any = loader.batch_sampler
    if batches is None:
        raise FederatedError(
            f"Expected the training loader of {owner} to have a `batch_size`, got none, so that its data set makes the "
            "batches itself: give a data set of single samples."
        )
    if type(batches) is not BatchSampler:
        raise FederatedError(
            f"Expected the training loader of {owner} to make batches by `batch_size`, got its own "
            f"{type(batches).__name__}, whose choice of samples is not used, as each client goes through its own "
            "samples in random order: give the loader a `batch_size` instead."
        )
    loading = Loading().changed(
        batch_size=batches.batch_size,
        # A loader without a `collate_fn` shows torch's default one.
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        drop_last=batches.drop_last,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
    )
    return loading, batches.sampler


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


def is_datamodule(value: Any) -> bool:
    """Whether something is a LightningDataModule, of the package ``lightning`` or ``pytorch_lightning``."""
    return any(base.__name__ == "LightningDataModule" for base in type(value).__mro__)


def expect_source(source: Any, **given: Any) -> None:
    """Refuses a source that is no data module, and a source together with other data, such as ``train_dataset``."""
    if is_datamodule(given["train_dataset"]):
        raise FederatedError(
            "Expected `train_dataset` to be a data set, got the data module "
            f"{type(given['train_dataset']).__name__}: give it as `source=`."
        )
    if source is None:
        return
    if not is_datamodule(source):
        hint = "give loaders to `fit(model, train_dataloaders=...)`, and a data set as `train_dataset`"
        got = name_kind(source) if isinstance(source, type) else f"{type(source).__name__}: {hint}"
        raise FederatedError(f"Expected `--data.source` to be a LightningDataModule, got {got}.")
    for name, value in given.items():
        if value is not None:
            raise FederatedError(
                f"Expected either `--data.source` or `--data.{name}`, got both: leave one out, or give the data sets "
                "of the source one by one."
            )


class GivenLoaders(LightningDataModule):
    """Data loaders as a data module; if one is missing, the model's own is used, as in Lightning.

    Args:
        model: The model whose loaders are used for missing ones; None for none.
        **loaders: ``train``, ``val``, ``test`` and ``predict``.

    Attributes:
        origin: Where the training loader comes from, in words.
        model_set_up_for: The stages for which the model was set up, because its own loaders may need that.
    """

    def __init__(self, model: Any, **loaders: Any) -> None:
        super().__init__()
        self._given = {name for name, loader in loaders.items() if loader is not None}
        self._model = model
        self.origin = "`train_dataloaders`" if "train" in self._given else type(model).__name__
        self.model_set_up_for: list[str] = []
        for name in ("train", "val", "test", "predict"):
            method = f"{name}_dataloader"
            if name in self._given:
                setattr(self, method, lambda loader=loaders[name]: loader)
            elif overrides(model, method):
                setattr(self, method, getattr(model, method))

    def setup(self, stage: str) -> None:
        """Sets up the model, if the first loaders of the stage are its own."""
        first = {"fit": "train", "validate": "val"}.get(stage, stage)
        if first not in self._given:
            self._model.setup(stage)
            self.model_set_up_for.append(stage)


class SourceModule:
    """Calls a user's data module as Lightning does: prepares it once, and sets it up for each stage before its loaders.

    What it draws at random, such as a validation set, depends only on the seed, so all processes draw the same.
    ``context`` returns the trainer, or None, and that seed. With ``labelled`` the classes of loaders whose data sets
    name them must be those of the training set.
    """

    def __init__(self, module: Any, context: Callable[[], tuple[Any, int]], labelled: bool = True) -> None:
        self.module, self._context, self._labelled = module, context, labelled
        self._train: Any = None
        self._prepared = False
        self._stages: set[str] = set()

    def prepare(self) -> None:
        """Prepares the data in this process."""
        self.module.trainer, _ = self._context()
        self.module.prepare_data()
        self._prepared = True

    def set_up(self, stage: str) -> None:
        """Sets up for ``fit``, ``validate``, ``test`` or ``predict``; a second time only after it was torn down."""
        trainer, seed = self._context()
        if not self._prepared and getattr(trainer, "is_global_zero", True):  # reached without ``prepare_data``
            self.prepare()
        if stage not in self._stages:
            self.module.trainer = trainer
            with isolated_streams(seed):
                self.module.setup(stage)
            self._stages.add(stage)

    def tear_down(self, stage: str) -> bool:
        """Tears the module down; returns whether loaded data may be gone."""
        self.module.teardown(stage)
        gone = overrides(self.module, "teardown")
        if gone:
            self._stages.clear()
        return gone

    def train_set(self) -> tuple[AnyDataset, Loading]:
        """Returns all training samples, and how they become batches."""
        self.set_up("fit")
        with isolated_streams(self._context()[1]):
            loader = self.module.train_dataloader() if overrides(self.module, "train_dataloader") else None
        self._train, loading = read_loader(loader, self.name)
        return self._train, loading

    def loaders(self, stage: EvalStage) -> EvalLoaders:
        """Returns the module's loaders of a stage as they are, an empty list where it has none."""
        if not overrides(self.module, f"{stage}_dataloader"):
            return []
        if not self._stages.intersection(_STAGES[stage]):
            self.set_up(_STAGES[stage][-1])
        with isolated_streams(self._context()[1]):
            loaders = getattr(self.module, f"{stage}_dataloader")()
        if isinstance(loaders, CombinedLoader):
            if loaders._mode != "sequential":
                raise FederatedError(
                    f"Expected the {stage} loaders of {self.name} to be read one after the other, got a CombinedLoader "
                    f'that joins their batches: give it mode="sequential" (got {loaders._mode}), or give a list.'
                )
            loaders = loaders.iterables
        listed = list(loaders.values()) if isinstance(loaders, dict) else loaders
        for loader in (listed if isinstance(listed, list) else [listed]) if self._labelled else ():
            sets = {"training": self._train, stage: getattr(loader, "dataset", None)}
            expect_one_meaning({f"the {part} data of {self.name}": dataset for part, dataset in sets.items()})
        return [] if loaders is None else loaders

    @property
    def name(self) -> str:
        """The module's class, or where loaders without a module come from."""
        return self.module.origin if isinstance(self.module, GivenLoaders) else type(self.module).__name__
