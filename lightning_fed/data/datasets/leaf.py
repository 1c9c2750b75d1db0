"""Samples of users as LEAF has them: FEMNIST, characters by writer, and Shakespeare, texts by speaking role."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from lightning_fed.data.datasets.bundled import UserDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.readers.array_files import ArrayFile
from lightning_fed.data.readers.leaf import UserSamples, known_and_unseen, read_leaf
from lightning_fed.data.readers.plays import LETTERS, WINDOW, Role, TextWindows, read_plays, read_roles
from lightning_fed.errors import FederatedError, expect, expect_count, expect_number

__all__ = ["FEMNIST", "Shakespeare"]

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
        self.pixel_mean, self.pixel_std, self.digits_only = mean, std, digits_only

    def identity(self) -> list[str]:
        return [*super().identity(), *["digits only"] * self.digits_only]

    def load_datasets(self) -> Datasets:
        place = self.place
        if place.is_dir():
            train = _checked(read_leaf(place / "train"), place / "train")
            test = _checked(read_leaf(place / "test"), place / "test") if (place / "test").is_dir() else None
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
        return self.of_users(
            train,
            test,
            self._dataset,
            class_names=_CLASSES[:10] if self.digits_only else _CLASSES,
            mean=(self.pixel_mean,),
            std=(self.pixel_std,),
        )

    def _dataset(self, samples: UserSamples) -> TensorDataset:
        return TensorDataset((samples.inputs - self.pixel_mean).div_(self.pixel_std), samples.labels)


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
    expect(len(samples.inputs), f"Expected images in {place}, got none: change `--data.path`.")
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


class Shakespeare(UserDataModule):
    """Windows of 80 characters and the next one, from Shakespeare's plays; a user is a speaking role; 81 classes.

    Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
    2017, in the form of S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Characters are numbered as
    LEAF's 80 letters; any other character is 80. Three forms are read:

    - JSON with the text of each role, .json or .json.gz: ``user_data`` holds for each user ``{"raw": text}``, and
      ``num_samples`` counts its windows: the characters beyond the first 80.
    - Plays as plain text, .txt or .txt.gz: speeches separated by empty lines, each after a line with its speaker and a
      colon, plays after ``==== TITLE ====``; roles with at least ``min_lines`` lines take part.
    - LEAF's JSON, a folder with ``train/*.json`` and, if it is there, ``test/*.json``: ``x`` holds strings of 80
      characters, ``y`` the character after each. Test samples of roles with training samples go to the test set, those
      of other roles to the test set ``unseen``.

    Without LEAF's test files each role's windows are divided by time. The first ``1 - test_fraction`` of them, at least
    one, are training samples. Test windows begin after the last character of the training windows, so the two do not
    overlap; a role with too few windows has no test samples. Sets that are drawn at random, such as with
    ``val_fraction``, do overlap with training windows.

    A sample costs a few bytes beside the text: windows are gathered from one encoded text on the device.

    Args:
        path: File or folder, relative to ``root``.
        min_samples: Roles with fewer windows, training and test together, are left out before the draw.
        max_samples: Only the first ``max_samples`` windows of a role are used; all if not given.
        min_lines: Roles with fewer lines are left out; for plays as text only.
        test_fraction: Share of each role's windows at its end that is kept for the test; in [0, 1).
        **kwargs: Every other option of ``UserDataModule``; a user is a role.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "shakespeare/by_role.json.gz",
        min_samples: int = 1,
        max_samples: int | None = None,
        min_lines: int = 2,
        test_fraction: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(path=path, **kwargs)
        expect_count("--data.min_samples", min_samples)
        expect_count("--data.min_lines", min_lines)
        expect_number("--data.test_fraction", test_fraction, least=0, below=1)
        if max_samples is not None:
            expect_count("--data.max_samples", max_samples)
        self.min_samples, self.max_samples, self.min_lines = min_samples, max_samples, min_lines
        self.test_fraction = test_fraction

    def load_datasets(self) -> Datasets:
        roles, tests = self._read()
        large = [role for role in roles if len(role.starts) >= self.min_samples]
        chosen = [large[number] for number in self.draw(len(large))]
        if not chosen:
            raise FederatedError(
                f"Expected roles with at least {self.min_samples} windows of {WINDOW} characters and the next one in "
                f"{self.place}, got none: lower `--data.min_samples`, or change `--data.path`."
            )
        starts: Sequence[Any] = [role.starts[: self.max_samples] for role in chosen]
        if tests is None:
            self._expect_consecutive(chosen)
            starts, later = zip(*[by_time(part, self.test_fraction) for part in starts], strict=True)
            users = np.repeat(np.arange(len(chosen)), [len(part) for part in later])
            test_sets = self.test_sets(_windows(chosen, later), None, users)
        else:
            names = ([role.name for role in part] for part in (tests, roles, chosen))
            rows, places, other_rows = known_and_unseen(*names)
            known, unseen = ([tests[number] for number in which] for which in (rows, other_rows))
            users = np.repeat(places, [len(role.starts) for role in known])
            own, others = (_windows(part, [role.starts for role in part]) if part else None for part in (known, unseen))
            test_sets = self.test_sets(own, others, users)
        return Datasets(
            _windows(chosen, starts),
            **test_sets,
            users=np.repeat(np.arange(len(chosen)), [len(part) for part in starts]),
            class_names=(*LETTERS, "unknown"),
        )

    def _expect_consecutive(self, roles: Sequence[Role]) -> None:
        """Refuses to divide by time if windows are not consecutive: they may then overlap unnoticed."""
        if self.test_fraction > 0 and any((np.diff(role.starts) != 1).any() for role in roles):
            raise FederatedError(
                f"Expected consecutive windows in {self.place} to divide each role by time, got others: add LEAF's "
                "folder test/ beside train/, or set `--data.test_fraction 0`."
            )

    def _read(self) -> tuple[list[Role], list[Role] | None]:
        """Reads the roles, and those of LEAF's test files; None without such files."""
        place = self.place
        if place.name.endswith((".txt", ".txt.gz")):
            return read_plays(place, self.min_lines), None
        if not (place / "train").is_dir():
            return read_roles(place), None
        tests = read_roles(place / "test") if (place / "test").is_dir() else None
        return read_roles(place / "train"), tests


def by_time(starts: npt.NDArray[np.int64], test_fraction: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Divides a role's windows into the first ones and later ones that share no character with them.

    Args:
        starts: Where the windows begin, ascending, shape (n,), n > 0.
        test_fraction: Share of the windows after the first part, in [0, 1).

    Returns:
        Starts of the training windows: the first ``(1 - test_fraction) n``, rounded, at least one. Starts of the test
        windows: those that begin after the last character of the training windows.
    """
    if test_fraction == 0:
        return starts, starts[:0]
    train = starts[: max(1, round((1 - test_fraction) * len(starts)))]
    return train, starts[starts > train[-1] + WINDOW]


def _windows(roles: Sequence[Role], starts: Sequence[npt.NDArray[Any]]) -> TextWindows:
    """Joins the texts of roles, with each one's windows."""
    offsets = np.cumsum([0] + [len(role.codes) for role in roles])
    places = np.concatenate([part + offset for part, offset in zip(starts, offsets, strict=False)])
    text = torch.from_numpy(np.concatenate([role.codes for role in roles]))
    return TextWindows(text, torch.from_numpy(places.astype(np.int32)), WINDOW)
