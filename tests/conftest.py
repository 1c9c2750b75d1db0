"""Fixtures shared by all tests."""

import os
from pathlib import Path

# Before torch is loaded: the number of threads decides how sums are split, and runs of the tests are compared with runs
# in processes that they start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; the test is skipped when there is none."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    root = Path(os.environ.get("LIGHTNING_FED_DATA") or default)
    if not (root / "MNIST" / "raw").is_dir() or not (root / "FashionMNIST" / "raw").is_dir():
        pytest.skip(f"no MNIST/raw and FashionMNIST/raw in {root}: set LIGHTNING_FED_DATA to their folder")
    return root
