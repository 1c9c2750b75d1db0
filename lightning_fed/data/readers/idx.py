"""A checked reader of idx files, the format of MNIST (LeCun, http://yann.lecun.com/exdb/mnist/)."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.errors import FederatedError

__all__ = ["find_idx", "read_idx"]

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def find_idx(folder: Path, name: str) -> Path | None:
    """Returns the path of a file in a folder, unpacked or with ``.gz``, None when there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, ndim: int, advice: str = "fetch it again") -> npt.NDArray[Any]:
    """Reads an idx file, packed with gzip if its name ends in ``.gz``.

    Args:
        path: The file.
        ndim: Dimensions that the array must have: 1 for labels, 3 for images.
        advice: What to do about a bad file, the end of the error's sentence.

    Returns:
        The array in native byte order.

    Raises:
        FederatedError: If the file cannot be unpacked, is no idx file of ``ndim`` dimensions, or has the wrong length.
    """
    content = _read(path, advice)
    dtype, shape, start = _header(content, path, ndim, advice)
    expected, found = math.prod(shape) * dtype.itemsize, len(content) - start
    if expected != found:
        state = "is truncated" if found < expected else "is too long"
        raise FederatedError(
            f"The file {path} {state}: its header promises {expected} bytes of data, it holds {found}; {advice}."
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


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


def _header(content: bytes, path: Path, ndim: int, advice: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    start = 4 + 4 * ndim
    sound = len(content) >= start and content[:2] == b"\0\0" and content[2] in _DTYPES and content[3] == ndim
    if not sound:
        raise FederatedError(
            f"The file {path} is not an idx file of {ndim} dimension(s): expected it to start with 0000, a type "
            f"code and 0{ndim}, got {content[:4].hex() or 'nothing'}; {advice}."
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=ndim, offset=4))
    return np.dtype(_DTYPES[content[2]]), shape, start
