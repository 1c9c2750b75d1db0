"""A checked reader of idx files, the format of MNIST (LeCun, http://yann.lecun.com/exdb/mnist/)."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_fed.errors import FederatedError

__all__ = ["find_idx", "read_idx"]


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
