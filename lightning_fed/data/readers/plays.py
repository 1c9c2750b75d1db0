"""Texts of speaking roles, from JSON or from plays as plain text, and the windows of characters in them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.data.readers.leaf import UNREADABLE, LeafUser, leaf_users, read_text
from lightning_fed.errors import FederatedError

__all__ = [
    "LETTERS", "Role", "TextWindows", "UNKNOWN", "WINDOW", "WindowGather", "decode", "encode", "read_plays",
    "read_roles",
]  # fmt: skip

# The 80 letters of LEAF (S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018), in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = len(LETTERS)
WINDOW = 80

_Codes: TypeAlias = npt.NDArray[np.uint8]
_TABLE = np.full(129, UNKNOWN, dtype=np.uint8)
_TABLE[[ord(letter) for letter in LETTERS]] = np.arange(UNKNOWN)


class WindowGather:
    """Gathers windows of ``length`` tokens from a text, uint8 of shape (tokens,), on the device of their starts."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __call__(self, starts: Tensor) -> Tensor:
        """Returns the windows that begin at ``starts`` (B,): shape (B, length), int64."""
        if self.text.device != starts.device:
            self.text = self.text.to(starts.device)
        # Row i of this view is the window that begins at i; only the rows asked for are copied.
        return self.text.unfold(0, self.length, 1).index_select(0, starts).long()


class TextWindows(TensorDataset):
    """A map-style data set whose sample i is ``length`` consecutive tokens of one text, and the token after them.

    The windows overlap and are not stored: beside the text a sample costs twelve bytes, its start and its target.

    Args:
        text: The encoded text, shape (tokens,), uint8, with at least ``length + 1`` tokens from every start on.
        starts: Where each window begins in it, shape (samples,), int32.
        length: Tokens in a window.
    """

    # After `convert_inputs`, which sources call on a whole batch.
    samples_are_rows = True

    def __init__(self, text: Tensor, starts: Tensor, length: int = 80) -> None:
        last = len(text) - length - 1
        if len(starts) and not 0 <= starts.min() <= starts.max() <= last:
            raise FederatedError(
                f"Expected windows of {length} tokens to begin at 0 to {last} in a text of {len(text)}, got `starts` "
                f"from {starts.min()} to {starts.max()}: leave out the others."
            )
        super().__init__(starts, text[starts.long() + length].long())
        self.convert_inputs = WindowGather(text, length)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Returns a window, shape (length,), int64, and the token after it, a scalar of type int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Returns several samples with one gather, as data loaders ask for them."""
        starts, targets = (tensor[torch.as_tensor(indices, dtype=torch.int64)] for tensor in self.tensors)
        return list(zip(self.convert_inputs(starts), targets, strict=True))


@dataclass(frozen=True)
class Role:
    """What one role says.

    Attributes:
        name: Name of play and role.
        codes: The text, shape (characters,), uint8.
        starts: Where its windows begin in ``codes``, ascending, shape (samples,), int64.
    """

    name: str
    codes: _Codes
    starts: npt.NDArray[np.int64]

    @classmethod
    def speaking(cls, name: str, text: str) -> "Role":
        """Takes every window of a text: as many as it has characters beyond the 80 of a window."""
        return cls(name, encode(text), np.arange(max(0, len(text) - WINDOW)))


def encode(text: str) -> _Codes:
    """Returns the number of each character in ``LETTERS``, 80 for any other, shape (characters,), uint8."""
    points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    codes: _Codes = _TABLE[np.minimum(points, 128)]
    return codes


def decode(codes: Any) -> str:
    """Returns the text of a vector of tokens, with ``\N{REPLACEMENT CHARACTER}`` for unknown characters."""
    return "".join((LETTERS + "\N{REPLACEMENT CHARACTER}")[int(code)] for code in codes)


def read_roles(path: Path) -> list[Role]:
    """Reads a JSON file, or a folder of them, in the format of LEAF.

    A user's entry holds its text as ``raw``, whose windows are the samples, or the samples themselves: ``x``, strings
    of 80 characters, and ``y``, the character after each. Consecutive samples are stored as one text.
    """
    roles = []
    for user in leaf_users(path, _count):
        data = user.data
        roles.append(Role.speaking(user.name, data["raw"]) if "raw" in data and "x" not in data else _joined(user))
    return roles


def read_plays(path: Path, min_lines: int = 2) -> list[Role]:
    """Reads plays as plain text and puts together what each role says, in the order of the text.

    Speeches are separated by empty lines. The first line of a speech is its speaker and a colon; a block ``==== TITLE
    ====`` begins a play. Lines are joined by spaces. The same name in another play is another role; capital letters
    make no difference. Roles with fewer lines than ``min_lines`` are left out: 2 in B. McMahan et al.,
    "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """
    try:
        text = read_text(path)
    except UNREADABLE as error:
        raise FederatedError(
            f"The file {path} cannot be read as text ({error}): it is truncated or damaged; write it again, or change "
            f"`--data.path`."
        ) from error
    lines: dict[str, list[str]] = {}
    for play, speaker, speech in _speeches(text, path):
        name = re.sub(r"\W+", "_", f"{play}_{speaker}".upper()).strip("_")
        lines.setdefault(name, []).extend(speech)
    texts = {name: re.sub(r"\s+", " ", " ".join(spoken)) for name, spoken in lines.items() if len(spoken) >= min_lines}
    return [Role.speaking(name, text) for name, text in texts.items()]


def _speeches(text: str, path: Path) -> Iterator[tuple[str, str, list[str]]]:
    play = ""
    for block in re.split(r"\n\s*\n", text.strip()):
        first, *speech = [line.strip() for line in block.strip().split("\n")]
        if title := re.fullmatch(r"=+ (.*) =+", first):
            play = title[1]
        elif not first.endswith(":"):
            raise FederatedError(
                f"Expected every speech in {path} to follow an empty line and a line with its speaker and a colon, got "
                f"{first[:60]!r}: write the plays in this form, or change `--data.path`."
            )
        else:
            yield play, first.rstrip(":"), speech


def _count(user: LeafUser) -> int:
    """Checks the types of a role's samples, and counts them."""
    data = user.data if isinstance(user.data, dict) else {}
    raw, x, y = data.get("raw"), data.get("x"), data.get("y")
    x = x.tolist() if isinstance(x, np.ndarray) else x  # numbers, not text
    if x is None and isinstance(raw, str):
        return max(0, len(raw) - WINDOW)
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise FederatedError(
            f"Expected {user.place} to hold a text as raw, or lists x and y of the same length, got "
            f"{', '.join(data) or type(user.data).__name__}: write the file again."
        )
    for values, size in ((x, WINDOW), (y, 1)):
        wrong = next((value for value in values if not isinstance(value, str) or len(value) != size), None)
        if wrong is not None:
            raise FederatedError(
                f"Expected samples of {WINDOW} characters and the character after them in {user.place}, got "
                f"{str(wrong)[:90]!r}: write the file again."
            )
    return len(y)


def _joined(user: LeafUser) -> Role:
    """Joins windows that each move on by one character, so that no text is stored twice."""
    windows = encode("".join(user.data["x"])).reshape(-1, WINDOW)
    targets = encode("".join(user.data["y"]))
    goes_on = (windows[1:, :-1] == windows[:-1, 1:]).all(axis=1) & (windows[1:, -1] == targets[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    sizes = np.diff(np.append(first, len(windows)))
    pieces, starts, length = [], [], 0
    for row, size in zip(first.tolist(), sizes.tolist(), strict=True):
        pieces += [windows[row], targets[row : row + size]]
        starts.append(length + np.arange(size))
        length += WINDOW + size
    return Role(user.name, np.concatenate(pieces), np.concatenate(starts))
