"""Data of a federated run: any data set, a partitioner, and batches of one client at a time."""

from lightning_fed.data.arrays import Arrays
from lightning_fed.data.augmentation import Augmentation, AugmentedSource, CropFlip
from lightning_fed.data.bundled import BundledDataModule
from lightning_fed.data.cifar import CIFAR10, CIFAR100
from lightning_fed.data.colored_mnist import ColoredMNIST, ColoredMNISTBinary, FedCMNIST, FedRotMNIST
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.digits import Digits
from lightning_fed.data.division import Division, HeldOut
from lightning_fed.data.emnist import EMNIST
from lightning_fed.data.femnist import FEMNIST
from lightning_fed.data.figures import samples_figure, sizes_figure, split_figure, split_figures
from lightning_fed.data.idx import read_idx
from lightning_fed.data.images import ImageDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.mnist import MNIST, FashionMNIST
from lightning_fed.data.partitioners import (
    IID,
    ByUser,
    DirichletBalanced,
    DirichletByClass,
    DirichletByClient,
    ExactClasses,
    Partitioner,
    PowerLaw,
    QuantityDirichlet,
    Shards,
)
from lightning_fed.data.shakespeare import Shakespeare
from lightning_fed.data.skews import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew
from lightning_fed.data.sources import BatchSource, EvalBatches, LoaderSource, TensorSource
from lightning_fed.data.split import Split
from lightning_fed.data.text_windows import TextWindows
from lightning_fed.data.tiny_imagenet import TinyImageNet
from lightning_fed.data.user_data import UserDataModule

__all__ = [
    "IID",
    "MNIST",
    "Arrays",
    "BinaryColors",
    "ClassColors",
    "ClientColors",
    "ClientRotation",
    "ColoredMNIST",
    "ColoredMNISTBinary",
    "FeatureSkew",
    "FedCMNIST",
    "FedRotMNIST",
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
    "ByUser",
    "DirichletBalanced",
    "DirichletByClass",
    "DirichletByClient",
    "Division",
    "ExactClasses",
    "HeldOut",
    "PowerLaw",
    "QuantityDirichlet",
    "read_idx",
    "samples_figure",
    "sizes_figure",
    "split_figure",
    "split_figures",
    "Augmentation",
    "AugmentedSource",
    "CropFlip",
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "ImageDataModule",
    "TinyImageNet",
    "FEMNIST",
    "Shakespeare",
    "TextWindows",
    "UserDataModule",
]
