"""A user's own arrays from files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch.utils.data import TensorDataset

from lightning_fed.data.datasets.bundled import BundledDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.readers.array_files import SUFFIXES, ArrayFile, Layout, as_inputs, as_labels, as_numbers
from lightning_fed.data.readers.folders import data_folder
from lightning_fed.errors import FederatedError, expect, expect_choice

__all__ = ["Arrays"]


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
