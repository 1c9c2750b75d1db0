"""Images in memory: read from idx files, kept as floats or as bytes, normalised."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.errors import FederatedError

__all__ = ["ByteImages", "Normalisation", "Storage", "find_idx", "image_dataset", "read_idx"]

Storage: TypeAlias = Literal["auto", "float32", "uint8"]

# Images that would take more bytes than this as floats are stored as bytes.
_LARGE = 2**30


def find_idx(folder: Path, name: str) -> Path | None:
    """Returns the path of a file in a folder, unpacked or with ``.gz``, None when there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, ndim: int, advice: str = "fetch it again") -> npt.NDArray[np.uint8]:
    """Reads an idx file of bytes in ``ndim`` dimensions, 1 for labels or 3 for images, packed or not."""
    content = _read(path, advice)
    start, kind = 4 + 4 * ndim, bytes([0, 0, 8, ndim])
    if len(content) < start or content[:4] != kind:
        raise FederatedError(
            f"The file {path} is not an idx file of bytes in {ndim} dimension(s): expected it to start with "
            f"{kind.hex()}, got {content[:4].hex() or 'nothing'}; {advice}."
        )
    shape = np.frombuffer(content, ">u4", count=ndim, offset=4).tolist()
    expected, found = math.prod(shape), len(content) - start
    if expected != found:
        state = "is truncated" if found < expected else "is too long"
        raise FederatedError(
            f"The file {path} {state}: its header promises {expected} bytes of data, it holds {found}; {advice}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _read(path: Path, advice: str) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except EOFError as error:
        raise FederatedError(f"The file {path} is truncated: its gzip stream ends early; {advice}.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FederatedError(f"The file {path} is not a sound gzip file ({error}); {advice}.") from error
    except OSError as error:
        raise FederatedError(f"The file {path} cannot be read ({error.strerror or error}); {advice}.") from error


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
