"""Files of data sets: whole downloads, and images, decoded once, as floats or bytes, normalised."""

import hashlib
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.core.files import WriteError, open_atomically, open_regular
from lightning_fed.errors import FederatedError

__all__ = [
    "ByteImages", "Normalisation", "Storage", "cached_tensors", "data_folder", "fetch_whole", "fingerprint_of",
    "found_none", "image_dataset", "read_images",
]  # fmt: skip

# What torch raises for a file that was cut, changed, or is of another kind.
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError, zipfile.BadZipFile)

# What a download can end with: no network, no space, a wrong checksum, an archive that cannot be unpacked.
_FAILURES = (OSError, RuntimeError, EOFError, zipfile.BadZipFile)

Storage: TypeAlias = Literal["auto", "float32", "uint8"]

# Images that would take more bytes than this as floats are stored as bytes.
_LARGE = 2**30


def data_folder(root: str | os.PathLike[str] | None) -> Path | None:
    """Returns the folder of data sets: ``root``, else what ``LIGHTNING_FED_DATA`` names, None without either."""
    folder = root or os.environ.get("LIGHTNING_FED_DATA")
    return Path(folder).expanduser() if folder else None


def found_none(what: str, path: Path, option: str) -> FederatedError:
    """Makes the error for files that are not where an option says."""
    return FederatedError(
        f"Expected {what} {path.absolute()}, found none: change `{option}`, or set `--data.root` (or the environment "
        "variable LIGHTNING_FED_DATA) to the folder that it lies in."
    )


def fetch_whole(root: Path, folder: str, fetch: Callable[[Path], None]) -> None:
    """Downloads into a temporary folder beside the files' place and moves them there when all are complete.

    A download that is interrupted leaves at most a hidden folder ``ROOT/.download-*``, which nothing reads. ``fetch``
    gets a folder to use instead of ``root``, downloads into it and checks the files.
    """
    top = Path(folder).parts[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=root) as temporary:
            fetch(Path(temporary))
            _move(Path(temporary) / top, root / top)
    except _FAILURES as error:
        raise FederatedError(
            f"Expected to download {top} into {root}, but that failed ({error}): put its files into {root / folder} "
            "yourself, or change `--data.root`."
        ) from error


def _move(source: Path, target: Path) -> None:
    """Moves a file or folder; existing files stay, except those of the same name."""
    if source.is_dir() and target.is_dir():
        for child in sorted(source.iterdir()):
            _move(child, target / child.name)
    else:
        os.replace(source, target)


def fingerprint_of(paths: Iterable[Path], root: Path) -> str:
    """Returns a hash, in hexadecimal, of the files' names below ``root``, their sizes and their times of change."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path.relative_to(root).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cached_tensors(path: Path, fingerprint: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Returns tensors from a file, or makes them and writes the file.

    The file is made again if it cannot be read or has another fingerprint, which names what the tensors are made from.
    A process that dies while it writes leaves the old file as it was.
    """
    tensors = _read(path, fingerprint)
    if tensors is not None:
        return tensors
    try:
        # Opened first: a folder that cannot be written to is found before the long work, not after it.
        with open_atomically(path, "--data.cache_dir") as file:
            tensors = make()
            torch.save({"fingerprint": fingerprint, "tensors": tensors}, file)
    except (WriteError, RuntimeError) as error:  # torch raises the latter for a full disk
        raise FederatedError(
            f"Expected to keep decoded images in {path}, but that failed ({error.__cause__ or error}): set "
            "`--data.cache_dir` to a folder that can be written to and has room."
        ) from error
    return tensors


def _read(path: Path, fingerprint: str) -> list[Tensor] | None:
    """Reads the file; None if it is missing or damaged, or has another fingerprint."""
    try:
        with open_regular(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE:
        return None
    is_ours = isinstance(content, dict) and content.get("fingerprint") == fingerprint
    return content["tensors"] if is_ours else None


def read_images(
    paths: Sequence[Path],
    root: Path,
    cache: str,
    cache_dir: str | os.PathLike[str] | None,
    side: int,
    advice: str,
    resize: bool = False,
) -> Tensor:
    """Decodes image files, or takes them from a cache if none has changed since; grey images get three equal channels.

    Args:
        paths: The files.
        root: The folder of the data set, in which they lie.
        cache: How the name of the cache begins.
        cache_dir: Where it is; ``lightning_fed`` in the user's cache folder if not given.
        side: Height and width of all images.
        advice: What to do about a bad file; the end of error messages.
        resize: Whether images of other sizes are resized; else they are refused.

    Returns:
        uint8 of shape (N, 3, side, side).
    """

    def decode_all() -> list[Tensor]:
        images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
        with ThreadPoolExecutor() as pool:  # decoding releases Python's lock
            for row, image in enumerate(pool.map(lambda path: _decode(path, side, advice, resize), paths)):
                images[row] = image
        return [images]

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fed"
    folder = folder if cache_dir is None else Path(cache_dir).expanduser()
    # With the path in its name, so that two copies of the data set do not overwrite each other's cache.
    place = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    (images,) = cached_tensors(folder / f"{cache}-{place}.pt", fingerprint_of(paths, root), decode_all)
    return images


def _decode(path: Path, side: int, advice: str, resize: bool) -> Tensor:
    """Decodes one file into uint8 of shape (3, side, side)."""
    from PIL import Image

    try:
        with open_regular(path) as file, Image.open(file) as image:
            colors = image.convert("RGB")
            pixels = np.array(colors.resize((side, side), Image.Resampling.BILINEAR) if resize else colors)
    except Exception as error:  # PIL has many
        kind = path.suffix[1:].upper()
        raise FederatedError(f"The file {path} is not a sound {kind} image ({error}); {advice}.") from error
    if pixels.shape != (side, side, 3):
        raise FederatedError(
            f"Expected the image {path} to have {side} x {side} pixels, got {pixels.shape[1]} x {pixels.shape[0]}; "
            f"{advice}."
        )
    return torch.from_numpy(pixels).permute(2, 0, 1)


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
