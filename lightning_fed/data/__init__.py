"""Data of a federated run: any data set, a partitioner, and batches of one client at a time."""

from lightning_fed.data.augmentation import Augmentation, AugmentedSource, CropFlip, SampleAugmentation
from lightning_fed.data.batch_sources import BatchSource, TensorSource
from lightning_fed.data.containers import ClientDatasets
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.datasets.altered import ColoredMNIST, ColoredMNISTBinary, FedCMNIST, FedRotMNIST, SpuriousMNIST
from lightning_fed.data.datasets.bundled import BundledDataModule, ImageDataModule, UserDataModule
from lightning_fed.data.datasets.color_images import CIFAR10, CIFAR100, TinyImageNet
from lightning_fed.data.datasets.digits import Digits
from lightning_fed.data.datasets.leaf import FEMNIST, Shakespeare
from lightning_fed.data.datasets.mnist import EMNIST, MNIST, FashionMNIST
from lightning_fed.data.datasets.own_files import Arrays, ImageFolders
from lightning_fed.data.holdout import Division, HeldOut
from lightning_fed.data.loading import Datasets
from lightning_fed.data.partitioners.base import Partitioner
from lightning_fed.data.partitioners.classes import ExactClasses, Shards
from lightning_fed.data.partitioners.dirichlet import DirichletBalanced, DirichletByClass, DirichletByClient
from lightning_fed.data.partitioners.quantity import IID, ByUser, PowerLaw, QuantityDirichlet
from lightning_fed.data.readers.plays import TextWindows
from lightning_fed.data.skews import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew
from lightning_fed.data.split import Split
from lightning_fed.data.summary import samples_figure, sizes_figure, split_figure, split_figures

__all__ = [
    "IID", "MNIST", "Arrays", "BinaryColors", "ClassColors", "ClientColors", "ClientRotation", "ColoredMNIST",
    "ColoredMNISTBinary", "FeatureSkew", "FedCMNIST", "FedRotMNIST", "BatchSource", "BundledDataModule", "Datasets",
    "Digits", "FashionMNIST", "FederatedDataModule", "Partitioner", "Shards", "Split", "TensorSource", "ByUser",
    "DirichletBalanced", "DirichletByClass", "DirichletByClient", "Division", "ExactClasses", "HeldOut", "PowerLaw",
    "QuantityDirichlet", "samples_figure", "sizes_figure", "split_figure", "split_figures", "Augmentation",
    "AugmentedSource", "CropFlip", "CIFAR10", "CIFAR100", "EMNIST", "ImageDataModule", "TinyImageNet", "FEMNIST",
    "SampleAugmentation", "Shakespeare", "TextWindows", "UserDataModule", "ClientDatasets", "SpuriousMNIST",
    "ImageFolders",
]  # fmt: skip
