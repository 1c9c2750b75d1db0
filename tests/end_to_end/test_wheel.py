"""A wheel needs no checkout: it holds the package and its configurations, which a run finds by name."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.end_to_end.command import REPOSITORY, environment

pytestmark = pytest.mark.slow
SOURCES = ("lightning_fed", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *words], check=True, env=environment(PIP_NO_INDEX="1"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds it from a copy, as building leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = REPOSITORY / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    pip("wheel", str(folder), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"))
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_content(wheel: Path) -> None:
    with ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith(".pyc")}
    package = REPOSITORY / "lightning_fed"
    files = [path for kind in ("py", "csv", "css", "js") for path in package.rglob(f"*.{kind}")]
    below = {path.relative_to(REPOSITORY).as_posix() for path in files}
    configs = {
        f"lightning_fed/{path.relative_to(REPOSITORY).as_posix()}" for path in REPOSITORY.glob("configs/**/*.yaml")
    }
    assert {name for name in names if ".dist-info/" not in name} == below | configs | {"lightning_fed/py.typed"}


def test_a_run_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    pip("install", str(wheel), "--no-deps", "--target", str(tmp_path / "installed"))
    work = tmp_path / "work"
    work.mkdir()
    words = [
        "fit",
        "--config",
        "quickstart",
        "--trainer.max_rounds",
        "1",
        "--trainer.logger",
        "[]",
        "--trainer.name",
        "run",
    ]
    program = [sys.executable, "-m", "lightning_fed"]
    env = environment(PYTHONPATH=str(tmp_path / "installed"))
    subprocess.run([*program, *words], check=True, cwd=work, env=env)
    assert (work / "runs/run/version_0/metrics.csv").is_file()
    listed = subprocess.run([*program, "configs"], check=True, cwd=work, env=env, capture_output=True, text=True)
    assert "quickstart" in listed.stdout
