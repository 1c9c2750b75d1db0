"""Small files in the formats of data that belong to users, written by the tests."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fed.data.readers.plays import LETTERS


def write_leaf(path: Path, entries: Mapping[str, Any], **changes: Any) -> Path:
    """One file as LEAF writes it; ``changes`` replace keys, None takes one away."""
    content: dict[str, Any] = {
        "users": list(entries),
        "num_samples": [_count(entry) for entry in entries.values()],
        "user_data": dict(entries),
    }
    content = {key: value for key, value in (content | changes).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def _count(entry: Any) -> int:
    if isinstance(entry, dict) and isinstance(entry.get("raw"), str):
        return len(entry["raw"]) - 80
    return len(entry["y"]) if isinstance(entry, dict) and "y" in entry else 1


def images_of(user: int, samples: int = 5) -> dict[str, Any]:
    """Characters of one writer: 784 pixels each, k / 255; labels go on from writer to writer."""
    pixels = np.random.default_rng(user).integers(0, 256, (samples, 784)) / 255
    return {"x": pixels.tolist(), "y": [(user * samples + number) % 62 for number in range(samples)]}


def write_femnist(root: Path, users: int = 40, samples: int = 5, unseen: bool = True) -> Path:
    """A folder as LEAF's preprocess.sh writes it: two training files, and a test file of the same or other writers."""
    entries = {f"f{user:04d}": images_of(user, samples) for user in range(users)}
    names = list(entries)
    for number, part in enumerate((names[: users // 2], names[users // 2 :])):
        write_leaf(root / "femnist" / "train" / f"all_data_{number}.json", {name: entries[name] for name in part})
    tests = {f"t{name}" if unseen else name: images_of(100 + i, 2) for i, name in enumerate(names[:31])}
    write_leaf(root / "femnist" / "test" / "all_data_0.json", tests)
    return root


def write_speech(path: Path, roles: int = 12, length: int = 884) -> Path:
    """Roles that say all of LEAF's letters and an unknown one, over and over, in an order of each role's own."""
    letters = np.array([*LETTERS, "$"])
    texts = (np.resize(np.random.default_rng(role).permutation(letters), length) for role in range(roles))
    return write_leaf(path, {f"R{role:02d}": {"raw": "".join(text)} for role, text in enumerate(texts)})
