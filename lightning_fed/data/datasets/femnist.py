"""FEMNIST: handwritten characters by writer, from LEAF's JSON or from arrays with writers."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_fed.data.datasets.bundled import UserDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.readers.array_files import ArrayFile
from lightning_fed.data.readers.leaf import UserSamples, known_and_unseen, places_of, read_leaf
from lightning_fed.errors import FederatedError, expect_number

__all__ = ["FEMNIST"]

_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


class FEMNIST(UserDataModule):
    """Handwritten digits and letters with their writers, shape (1, 28, 28), normalised, 62 classes or 10.

    Source: S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, https://arxiv.org/abs/1812.01097: about
    3,550 writers and 800,000 images. Labels are 0-9, A-Z, a-z in this order; paper is 1, ink is 0. Two forms are read:

    - A folder with LEAF's JSON: ``train/*.json`` and, if it is there, ``test/*.json``, as its ``preprocess.sh`` writes
      them. Test images of writers with training images go to the test set, those of other writers to the test set
      ``unseen``. LEAF's split by sample (``-t sample``) gives the first, its split by user (``-t user``) the second.
    - An .npz file, or a dict in a .pt file, that holds ``images`` of shape (N, 28, 28) or (N, 784), bytes or floats in
      [0, 1], ``labels`` of shape (N,) and ``writers``, one whole number per image; if they are there, ``test_images``,
      ``test_labels`` and ``test_writers`` make test sets by the same rule. You can convert other releases to this
      format in a few lines.

    Args:
        path: Folder or file, relative to ``root``.
        mean: Subtracted from images in [0, 1].
        std: Divides them after that; above 0. Mean and standard deviation are those in common use for LEAF's images.
        digits_only: Whether letters are left out, and writers who wrote no digit: 10 classes, as in Tenison et al.,
            TMLR 2023, Table 1.
        **kwargs: Every other option of ``UserDataModule``; a user is a writer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "femnist",
        mean: float = 0.9637,
        std: float = 0.1592,
        digits_only: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(path=path, **kwargs)
        expect_number("--data.std", std, above=0)
        self.pixel_mean = mean
        self.pixel_std = std
        self.digits_only = digits_only

    def identity(self) -> list[str]:
        """Adds whether letters are left out."""
        return [*super().identity(), *["digits only"] * self.digits_only]

    def load_datasets(self) -> Datasets:
        """Reads the files and chooses the writers."""
        place = self.place
        if place.is_dir():
            train, test = _from_json(place)
        else:
            file = ArrayFile(place, "--data.path")
            has_test = any(name.startswith("test_") for name in file.names)
            train, test = _part(file, ""), _part(file, "test_") if has_test else None
        if self.digits_only:
            train = train.where((train.labels < 10).numpy())
            test = None if test is None else test.where((test.labels < 10).numpy())
            if not train.names:
                raise FederatedError(
                    f"Expected digits in the training data of {place}, got only letters: set `--data.digits_only "
                    "false`, or change `--data.path`."
                )
        chosen = train.of(self.draw(len(train.names)))
        tests: dict[str, Any] = {}
        if test is not None:
            known, unseen = (test.of(part) for part in known_and_unseen(test.names, train.names, chosen.names))
            users = places_of(known.names, chosen.names)[known.users]
            tests = self.test_sets(self._dataset(known), self._dataset(unseen), users)
        return Datasets(
            train=self._dataset(chosen),
            **tests,
            users=chosen.users,
            class_names=_CLASSES[:10] if self.digits_only else _CLASSES,
            mean=(self.pixel_mean,),
            std=(self.pixel_std,),
        )

    def _dataset(self, samples: UserSamples) -> TensorDataset:
        return TensorDataset((samples.inputs - self.pixel_mean).div_(self.pixel_std), samples.labels)


def _from_json(folder: Path) -> tuple[UserSamples, UserSamples | None]:
    train = _checked(read_leaf(folder / "train", "--data.path"), folder / "train")
    if not (folder / "test").is_dir():
        return train, None
    return train, _checked(read_leaf(folder / "test", "--data.path"), folder / "test")


def _part(file: ArrayFile, prefix: str) -> UserSamples:
    images, labels, writers = (file.read(f"{prefix}{name}", "--data.path") for name in ("images", "labels", "writers"))
    whole = [tensor.ndim == 1 and not tensor.is_floating_point() for tensor in (labels, writers)]
    if not all(whole) or not len(images) == len(labels) == len(writers):
        raise FederatedError(
            f"Expected one label and one writer, whole numbers, for each image of {file.path}, got shapes "
            f"{tuple(images.shape)}, {tuple(labels.shape)} ({labels.dtype}) and {tuple(writers.shape)} "
            f"({writers.dtype}): write the file again, or change `--data.path`."
        )
    scaled = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    names, users = np.unique(writers.numpy(), return_inverse=True)
    samples = UserSamples(scaled, labels.long(), users.astype(np.int64), [str(name) for name in names])
    return _checked(samples, file.path)


def _checked(samples: UserSamples, place: Path) -> UserSamples:
    """Checks images and labels, and returns the images in shape (N, 1, 28, 28)."""
    shape = tuple(samples.inputs.shape[1:])
    if shape not in ((784,), (28, 28), (1, 28, 28)):
        raise FederatedError(
            f"Expected images of 28 x 28, or 784 values in a row, in {place}, got samples of shape {shape}: change "
            "`--data.path`."
        )
    if not len(samples.inputs):
        raise FederatedError(f"Expected images in {place}, got none: change `--data.path`.")
    images = samples.inputs.reshape(-1, 1, 28, 28)
    low, high = images.min().item(), images.max().item()
    if not (low >= 0 and high <= 1):
        wrong = ~((images >= 0) & (images <= 1)).flatten(1).all(dim=1)
        user = samples.names[samples.users[int(wrong.nonzero()[0])]]
        raise FederatedError(
            f"Expected pixels from 0 to 1 in {place}, got user {user}, values from {low} to {high}: "
            "divide them by their largest value, or change `--data.path`."
        )
    wrong = samples.labels[(samples.labels < 0) | (samples.labels >= len(_CLASSES))]
    if len(wrong):
        raise FederatedError(
            f"Expected labels from 0 to {len(_CLASSES) - 1} in {place}, got {wrong[0]}: change `--data.path`."
        )
    return UserSamples(images, samples.labels, samples.users, samples.names)
