"""A user's own files: arrays, and images that belong to users or domains, such as PACS, Office-Home and DomainNet."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_fed.data.datasets.bundled import BundledDataModule, UserDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.readers.array_files import SUFFIXES, ArrayFile, Layout, as_inputs, as_labels, as_numbers
from lightning_fed.data.readers.files import Normalisation, Storage, data_folder, found_none, image_dataset, read_images
from lightning_fed.data.readers.leaf import UserSamples
from lightning_fed.errors import FederatedError, expect, expect_choice, expect_count

__all__ = ["Arrays", "ImageFolders"]

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")


class Arrays(BundledDataModule):
    """Inputs and targets from .npz, .npy or .pt files, held in memory; large .npy files are memory-mapped.

    For an .npz file with ``x_train``, ``y_train``, ``x_test`` and ``y_test`` it is enough to set ``path``. Otherwise
    each array has an option: ``NAME`` in ``path``, a file with one array (``labels.npy``), or ``FILE:NAME``
    (``images.npz:test``). Relative paths start from ``root``.

    8-bit images become float32 in [0, 1] of shape (C, H, W), other floating inputs float32, integers wider than 8 bits
    int64. Targets must be whole numbers of at least 0 unless ``class_labels`` is false, which leaves them as they are.

    Args:
        path: File with named arrays: .npz, a dict in a .pt file, or a folder of .npy files named after the arrays.
        root: Folder of data sets; by default ``LIGHTNING_FED_DATA``, or the current folder if that is not set.
        x_train: Training inputs.
        y_train: Training targets.
        x_val: Validation inputs; by default ``x_val`` of ``path``, if there is one.
        y_val: Validation targets.
        x_test: Test inputs; by default ``x_test`` of ``path``, if there is one.
        y_test: Test targets.
        layout: Dimensions of the stored inputs: ``NHW`` (a channel dimension is added), ``NHWC`` (channels are moved
            before height and width), ``as_is`` (no change); ``auto`` guesses for 8-bit images and leaves others.
        scale: Whether 8-bit inputs are divided by 255.
        mean: Subtracted from inputs after scaling, one value or one for each channel.
        std: Divides inputs after that; above 0, one value or one for each channel.
        **kwargs: Every other option of ``BundledDataModule``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        x_train: str = "x_train",
        y_train: str = "y_train",
        x_val: str | None = None,
        y_val: str | None = None,
        x_test: str | None = None,
        y_test: str | None = None,
        layout: Layout = "auto",
        scale: bool = True,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        expect_choice("--data.layout", layout, get_args(Layout))
        expect(std is None or (torch.tensor(std) > 0).all(), f"Expected `--data.std` to be above 0, got {std}.")
        self.path, self.root = path, root
        self._chosen = {
            "x_train": x_train, "y_train": y_train, "x_val": x_val, "y_val": y_val, "x_test": x_test, "y_test": y_test,
        }  # fmt: skip
        self._kinds: dict[str, str] = {}
        self._input_options: dict[str, Any] = {"layout": layout, "scale": scale, "mean": mean, "std": std}

    def load_datasets(self) -> Datasets:
        files: dict[Path, ArrayFile] = {}
        train = self._dataset("train", files)
        sets: dict[str, Any] = {part: self._dataset(part, files) for part in ("val", "test") if self._has(part, files)}
        shape, kind = tuple(train.tensors[0].shape[1:]), self._kinds["train"]
        for part, dataset in sets.items():
            own = tuple(dataset.tensors[0].shape[1:])
            if own != shape or self._kinds[part] != kind:
                raise FederatedError(
                    f"Expected `--data.x_{part}` to hold inputs like those of `--data.x_train`, {kind} that become "
                    f"{shape}, got {self._kinds[part]} that become {own}."
                )
        mean, std = self._input_options["mean"], self._input_options["std"]
        if mean is None and std is None:
            return Datasets(train, **sets)
        given = (0.0 if mean is None else mean, 1.0 if std is None else std)
        means, stds = ([float(part)] if isinstance(part, int | float) else list(part) for part in given)
        return Datasets(train, **sets, mean=means, std=stds)

    def _has(self, part: str, files: dict[Path, ArrayFile]) -> bool:
        """Whether a part was asked for, or one of its arrays lies in ``path`` under its usual name."""
        options = (f"x_{part}", f"y_{part}")
        if any(self._chosen[option] is not None for option in options):
            return True
        return self.path is not None and any(option in self._file(self.path, "path", files).names for option in options)

    def _dataset(self, part: str, files: dict[Path, ArrayFile]) -> TensorDataset:
        arrays, names = [], []
        for option in (f"x_{part}", f"y_{part}"):
            file, name = self._find(option, files)
            arrays.append(file.read(name, f"--data.{option}"))
            names.append(f"{name} of {file.path}")
        inputs, targets = arrays
        if part == "train" and not len(inputs):
            raise FederatedError(f"Expected training samples in {names[0]}, got none: change `--data.x_train`.")
        self._kinds[part] = str(inputs.dtype).rpartition(".")[2]
        if len(inputs) != len(targets):
            raise FederatedError(
                f"Expected as many targets as inputs, got {len(inputs)} inputs in {names[0]} and {len(targets)} "
                f"targets in {names[1]}: change `--data.x_{part}` or `--data.y_{part}`."
            )
        no_labels = self.targets_are_labels is False
        labels = as_numbers(targets) if no_labels else as_labels(targets, names[1], f"--data.y_{part}")
        return TensorDataset(as_inputs(inputs, names[0], **self._input_options), labels)

    def _find(self, option: str, files: dict[Path, ArrayFile]) -> tuple[ArrayFile, str]:
        """Finds the file that an option names, and the array in it."""
        given = self._chosen[option] or option
        path, _, name = given.rpartition(":")
        if Path(path).suffix in SUFFIXES:
            return self._file(path, option, files), name
        if Path(given).suffix not in SUFFIXES:
            if self.path is None:
                raise FederatedError(
                    f"Expected `--data.path` to name the file that holds {given}, got none: set it, or set "
                    f"`--data.{option}` to a file."
                )
            return self._file(self.path, "path", files), given
        file = self._file(given, option, files)
        held = f"one array in {file.path}, which holds {file.listing()}"
        expect(len(file.names) == 1, f"Expected {held}: write `--data.{option} {given}:NAME`.")
        return file, file.names[0]

    def _file(self, path: str | os.PathLike[str], option: str, files: dict[Path, ArrayFile]) -> ArrayFile:
        full = (data_folder(self.root) or Path()) / Path(path).expanduser()
        if full not in files:
            files[full] = ArrayFile(full, f"--data.{option}")
        return files[full]


class ImageFolders(UserDataModule):
    """Image files ``.../USER/CLASS/FILE``, decoded once, as colour images of shape (3, size, size), normalised.

    A user may be a domain, such as ``sketch`` in PACS (D. Li, Y. Yang, Y.-Z. Song, T. Hospedales, "Deeper, Broader and
    Artier Domain Generalization", ICCV 2017). Users and classes are numbered in the order of their names. Test images
    of users with training images are the test set, those of other users the test set ``unseen``.

    Args:
        path: Folder, relative to ``root``.
        size: Height and width of the inputs; images of another size are resized.
        train_files: Pattern of the training images below ``path``, or of text files (.txt) that list them, one in each
            line, relative to ``path``. A number after a file's name is not read: its folder says the class.
        test_files: The same for test images; none if not given.
        unseen_users: Users who do not train: all their images are test images.
        mean: Mean of red, green and blue in [0, 1]; by default that of ImageNet.
        std: Their standard deviation.
        storage: As in ``ImageDataModule``.
        cache_dir: Folder of the decoded images; ``lightning_fed`` in the user's cache folder if not given.
        **kwargs: Every other option of ``UserDataModule``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int = 64,
        train_files: str = "*/*/*",
        test_files: str | None = None,
        unseen_users: Sequence[str] = (),
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        storage: Storage = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path=path, **kwargs)
        expect_count("--data.size", size)
        expect_choice("--data.storage", storage, get_args(Storage))
        sound = len(mean) == len(std) == 3 and min(std) > 0
        expect(sound, f"Expected `--data.mean` and `--data.std` to be 3 numbers, std above 0, got {mean} and {std}.")
        self.size, self.train_files, self.test_files = size, train_files, test_files
        self.unseen_users = tuple(unseen_users)
        self.pixel_mean, self.pixel_std = tuple(mean), tuple(std)
        self.storage, self.cache_dir = storage, cache_dir

    def identity(self) -> list[str]:
        return [*super().identity(), f"{self.size} pixels, without {', '.join(sorted(self.unseen_users)) or 'none'}"]

    def load_datasets(self) -> Datasets:
        train = self._listed(self.train_files, "train_files")
        files = train + (self._listed(self.test_files, "test_files") if self.test_files else [])
        names, users = np.unique([file.parts[-3] for file in files], return_inverse=True)
        classes, labels = np.unique([file.parts[-2] for file in files], return_inverse=True)
        unseen = np.isin(names, self.unseen_users)
        expect(
            unseen.sum() == len(set(self.unseen_users)) < len(names),
            f"Expected `--data.unseen_users` to name some, not all, of {len(names)} users ({', '.join(names[:12])}), "
            f"got {', '.join(self.unseen_users)}.",
        )
        place = self.place
        cache = f"{place.name}-{self.size}"
        images = read_images(files, place, cache, self.cache_dir, self.size, "write it again or remove it", resize=True)
        is_test = (np.arange(len(files)) >= len(train)) | unseen[users]
        samples = UserSamples(images, torch.from_numpy(labels), users, names.tolist())
        normalisation = Normalisation(self.pixel_mean, self.pixel_std)
        return self.of_users(
            samples.where(~is_test),
            samples.where(is_test) if is_test.any() else None,
            lambda part: image_dataset(part.inputs, part.labels, normalisation, self.storage),
            class_names=classes.tolist(),
            mean=self.pixel_mean,
            std=self.pixel_std,
        )

    def _listed(self, pattern: str, option: str) -> list[Path]:
        """Returns the image files that a pattern matches, or those that the matching lists name, in order."""
        place, files = self.place, list[Path]()
        for match in sorted(place.glob(pattern)):
            if match.suffix == ".txt":
                lines = filter(None, map(str.strip, match.read_text("utf-8").splitlines()))
                files += [place / re.sub(r"\s+\d+$", "", line) for line in lines]
            elif match.suffix.lower() in _IMAGES:
                files.append(match)
        missing = next((file for file in files if not file.is_file()), None if files else place / pattern)
        if missing is not None:
            raise found_none("images USER/CLASS/FILE in", missing, f"--data.{option}")
        return files
