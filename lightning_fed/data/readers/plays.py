"""Text by speaker: LEAF's vocabulary, plays as text, roles as JSON, and the windows of each role."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_fed.data.readers.leaf import UNREADABLE, LeafUser, leaf_users, read_text
from lightning_fed.errors import FederatedError

__all__ = ["LETTERS", "UNKNOWN", "WINDOW", "Role", "decode", "encode", "read_plays", "read_roles"]

# The 80 letters of LEAF (S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018), in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = len(LETTERS)
WINDOW = 80

_Codes: TypeAlias = npt.NDArray[np.uint8]
_TABLE = np.full(129, UNKNOWN, dtype=np.uint8)
_TABLE[[ord(letter) for letter in LETTERS]] = np.arange(UNKNOWN)


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


def read_roles(path: Path, option: str) -> list[Role]:
    """Reads a JSON file, or a folder of them, in the format of LEAF.

    A user's entry holds its text as ``raw``, whose windows are the samples, or the samples themselves: ``x``, strings
    of 80 characters, and ``y``, the character after each. Consecutive samples are stored as one text.
    """
    roles = []
    for user in leaf_users(path, option, _count):
        data = user.data
        roles.append(Role.speaking(user.name, data["raw"]) if "raw" in data and "x" not in data else _joined(user))
    return roles


def read_plays(path: Path, option: str, min_lines: int = 2) -> list[Role]:
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
            f"`{option}`."
        ) from error
    lines: dict[str, list[str]] = {}
    for play, speaker, speech in _speeches(text, path, option):
        name = re.sub(r"\W+", "_", f"{play}_{speaker}".upper()).strip("_")
        lines.setdefault(name, []).extend(speech)
    texts = {name: re.sub(r"\s+", " ", " ".join(spoken)) for name, spoken in lines.items() if len(spoken) >= min_lines}
    return [Role.speaking(name, text) for name, text in texts.items()]


def _speeches(text: str, path: Path, option: str) -> Iterator[tuple[str, str, list[str]]]:
    play = ""
    for block in re.split(r"\n\s*\n", text.strip()):
        first, *speech = [line.strip() for line in block.strip().split("\n")]
        if title := re.fullmatch(r"=+ (.*) =+", first):
            play = title[1]
        elif not first.endswith(":"):
            raise FederatedError(
                f"Expected every speech in {path} to follow an empty line and a line with its speaker and a colon, got "
                f"{first[:60]!r}: write the plays in this form, or change `{option}`."
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
