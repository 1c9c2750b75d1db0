"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; the test is skipped when there is none."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    root = Path(os.environ.get("LIGHTNING_FED_DATA") or default)
    if not (root / "MNIST" / "raw").is_dir() or not (root / "FashionMNIST" / "raw").is_dir():
        pytest.skip(f"no MNIST/raw and FashionMNIST/raw in {root}: set LIGHTNING_FED_DATA to their folder")
    return root
