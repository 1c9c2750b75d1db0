"""Image files that belong to users or domains, such as PACS, Office-Home and DomainNet: folders, or lists of files."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from lightning_fed.data.datasets.bundled import UserDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.readers.folders import found_none
from lightning_fed.data.readers.images import Normalisation, Storage, image_dataset, read_images
from lightning_fed.data.readers.leaf import UserSamples
from lightning_fed.errors import expect, expect_choice, expect_count

__all__ = ["ImageFolders"]

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")


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
