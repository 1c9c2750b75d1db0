"""Fixtures shared by all tests."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import copy
from functools import cache
from itertools import groupby
from pathlib import Path
from random import Random

# Before torch is loaded: the number of threads decides how sums are split, and runs of the tests are compared with runs
# in processes that they start.
os.environ["OMP_NUM_THREADS"] = "1"

# torch finds what it has compiled by its source: where ATEN_CPU_CAPABILITY asks for fewer instructions than there are,
# code for all of them would be found, and would not compile.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{capability}")

# Here, not within the first test that needs it: its log handler keeps the stderr that it finds when it is loaded, and
# that of a test is closed with the test.
import lightning.pytorch  # noqa: F401  # loaded for what it does then
import pytest
from jsonargparse import _common
from lightning.fabric.utilities import registry

from lightning_fed import core
from lightning_fed.data import split_figures

# As it is now: a test that generates data of a format says in the same variable where they are.
_DATA = Path(
    os.environ.get("LIGHTNING_FED_DATA") or Path(__file__).resolve().parents[1].parent / "shared" / "data"
).resolve()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes slow all but some cases of the tests with the mark `quick`, drawn alike in every process."""
    for _, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if not item.get_closest_marker("slow")]
        if cases and (mark := cases[0].get_closest_marker("quick")):
            kept = Random(0).sample(range(len(cases)), min(mark.args[0], len(cases)))
            for at in {*range(len(cases))}.difference(kept):
                cases[at].add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _quick_starts() -> Iterator[None]:
    """Runs without the pictures of their split, which take longer than a small run, and one look for entry points."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        patch.setattr("lightning_fed.cli.data_command.split_figures", split_figures)  # stays as it is
        patch.setattr("lightning_fed.data.split_figures", lambda *_: ())
        yield


@pytest.fixture(autouse=True)
def _any_class_may_be_named() -> Iterator[None]:
    """Takes back what `--safe_imports` restricts for the rest of a process."""
    before = {name: copy(value) for name, value in _common.parsing_settings.items()}
    yield
    _common.parsing_settings.update(before)
    os.environ.pop("LIGHTNING_FED_SAFE_IMPORTS", None)


@pytest.fixture(autouse=True)
def _all_is_news() -> None:
    """Lets every test hear the lines that a process says once."""
    core._SAID.clear()


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their split, as they do outside of tests."""
    monkeypatch.setattr("lightning_fed.data.split_figures", split_figures)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; the test is skipped when there is none."""
    root = _DATA
    if not (root / "MNIST" / "raw").is_dir() or not (root / "FashionMNIST" / "raw").is_dir():
        pytest.skip(f"no MNIST/raw and FashionMNIST/raw in {root}: set LIGHTNING_FED_DATA to their folder")
    return root


@pytest.fixture(scope="session")
def shakespeare_root() -> Path:
    """The folder that holds shakespeare/; the test is skipped when there is none."""
    root = _DATA
    if not (root / "shakespeare" / "by_role.json.gz").is_file():
        pytest.skip(f"no shakespeare/by_role.json.gz in {root}: set LIGHTNING_FED_DATA to its folder")
    return root


@pytest.fixture(scope="session")
def emnist_root(emnist_folder: Path | None) -> Path:
    """The folder that holds emnist47.npz; the test is skipped when there is none."""
    if emnist_folder is None:
        pytest.skip(
            f"no emnist47.npz in {_DATA}: write it as docs/data.md says, and set LIGHTNING_FED_DATA to its folder"
        )
    return emnist_folder


@pytest.fixture(scope="session")
def emnist_folder(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The same or None; where the data come with a script that unpacks them, the file is written for the tests."""
    root = _DATA
    if (root / "emnist47.npz").is_file():
        return root
    if not (root / "unpack.py").is_file():
        return None
    made = tmp_path_factory.mktemp("emnist")
    subprocess.run([sys.executable, str(root / "unpack.py"), str(made), "emnist47"], check=True, capture_output=True)
    return made
