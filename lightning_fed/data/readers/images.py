"""Images as tensors: stored as floats, or as bytes that are normalised batch by batch."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

__all__ = ["ByteImages", "Normalisation", "Storage", "image_dataset"]

Storage: TypeAlias = Literal["auto", "float32", "uint8"]

# Images that would take more bytes than this as floats are stored as bytes.
_LARGE = 2**30


class Normalisation:
    """Computes (x / 255 - mean) / std, with a mean and std per channel or for all; the same bits on every device."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # Tensors, not numbers: CUDA multiplies by the reciprocal of a number instead of dividing by it.
        self._constants = tuple(torch.tensor(values).reshape(-1, 1, 1) for values in ([255.0], mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        """Computes float32 of shape (..., C, H, W) from uint8 of the same shape."""
        if self._constants[0].device != images.device:
            self._constants = tuple(constant.to(images.device) for constant in self._constants)
        scale, mean, std = self._constants
        return images.to(torch.float32).div_(scale).sub_(mean).div_(std)


class ByteImages(TensorDataset):
    """Images kept as bytes, a quarter of the memory; a sample is a normalised image and its label.

    The arguments are those of ``image_dataset``.
    """

    # After `convert_inputs`, which sources call on a whole batch.
    samples_are_rows = True

    def __init__(self, images: Tensor, labels: Tensor, normalisation: Normalisation) -> None:
        super().__init__(images, labels)
        self.convert_inputs = normalisation

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        images, labels = self.tensors
        return self.convert_inputs(images[index]), labels[index]


def image_dataset(images: Tensor, labels: Tensor, normalisation: Normalisation, storage: Storage) -> TensorDataset:
    """Makes a data set of normalised images.

    Bytes take a quarter of the memory and give the same batches bit for bit, but each batch is normalised again. Hence
    ``auto`` keeps floats for small data sets and bytes for those that would take more than 1 GiB as floats. Images are
    uint8 of shape (N, C, H, W), labels int64 of shape (N,).
    """
    if storage == "uint8" or (storage == "auto" and 4 * images.numel() > _LARGE):
        return ByteImages(images.contiguous(), labels, normalisation)
    return TensorDataset(normalisation(images.contiguous()), labels)
