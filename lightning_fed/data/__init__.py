"""Data of a federated run: any data set, a partitioner, and batches of one client at a time."""

from lightning_fed.data.arrays import Arrays
from lightning_fed.data.datamodule import BundledDataModule, FederatedDataModule
from lightning_fed.data.digits import Digits
from lightning_fed.data.figures import split_figure
from lightning_fed.data.idx import read_idx
from lightning_fed.data.loading import Datasets
from lightning_fed.data.mnist import MNIST, FashionMNIST
from lightning_fed.data.partitioners import IID, Partitioner, Shards
from lightning_fed.data.sources import BatchSource, EvalBatches, LoaderSource, TensorSource
from lightning_fed.data.split import Split

__all__ = [
    "IID",
    "MNIST",
    "Arrays",
    "BatchSource",
    "BundledDataModule",
    "Datasets",
    "Digits",
    "EvalBatches",
    "FashionMNIST",
    "FederatedDataModule",
    "LoaderSource",
    "Partitioner",
    "Shards",
    "Split",
    "TensorSource",
    "read_idx",
    "split_figure",
]
