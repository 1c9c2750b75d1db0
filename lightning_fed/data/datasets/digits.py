"""The handwritten digits that come with scikit-learn: real data without a download."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from lightning_fed.data.datasets.bundled import BundledDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.partitioners import Partitioner, Shards
from lightning_fed.errors import expect_number

__all__ = ["Digits"]

# Fixed, like the test file of MNIST: all runs must have the same test images.
_TEST_SPLIT_SEED = 0


class Digits(BundledDataModule):
    """1,797 images of handwritten digits, shape (1, 8, 8), values in [0, 1], 10 classes.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository 1998,
    as bundled with scikit-learn. The test split is stratified and always the same.

    Args:
        num_clients: Number of clients.
        partitioner: How the samples are split over the clients.
        batch_size: Samples per local training batch.
        val_fraction: Share of the training images held out as central validation set; in [0, 1).
        test_fraction: Share of each class that goes to the test set; in [0, 1).
        **kwargs: Every other option of ``BundledDataModule``.
    """

    def __init__(
        self,
        num_clients: int = 20,
        partitioner: Partitioner = Shards(classes_per_client=2),  # noqa: B008 - holds no state
        batch_size: int = 10,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients=num_clients, partitioner=partitioner, batch_size=batch_size, val_fraction=val_fraction, **kwargs
        )
        expect_number("--data.test_fraction", test_fraction, least=0, below=1)
        self.test_fraction = test_fraction

    def load_datasets(self) -> Datasets:
        from sklearn.datasets import load_digits

        images, targets = load_digits(return_X_y=True)
        inputs = torch.from_numpy(images.astype(np.float32) / 16).reshape(-1, 1, 8, 8)
        labels = torch.from_numpy(targets.astype(np.int64))
        is_test = torch.from_numpy(_stratified_mask(targets, self.test_fraction))
        test = TensorDataset(inputs[is_test], labels[is_test]) if is_test.any() else None
        return Datasets(train=TensorDataset(inputs[~is_test], labels[~is_test]), test=test)


def _stratified_mask(targets: npt.NDArray[Any], fraction: float) -> npt.NDArray[np.bool_]:
    """Marks the same share of every class, shape (samples,)."""
    generator = np.random.default_rng(_TEST_SPLIT_SEED)
    mask = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        members = generator.permutation(np.flatnonzero(targets == label))
        mask[members[: round(fraction * len(members))]] = True
    return mask
