"""The package of three files of the page "Share a method": built, installed beside ours, tested, and used by name."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import REPOSITORY, blocks
from tests.end_to_end.command import environment

FILES = {block.title: block.text for block in blocks(REPOSITORY / "docs" / "share-a-method.md") if block.title}
FIT = ["fit", "--config", "quickstart", "--trainer.max_rounds=1", "--trainer.logger=[]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the package, with an entry point more that names nothing, into a folder of its own."""
    source, target = tmp_path_factory.mktemp("middle"), tmp_path_factory.mktemp("installed")
    assert list(FILES) == ["middle.py", "test_middle.py", "pyproject.toml", "middle.yaml"]
    for name in ("middle.py", "test_middle.py", "pyproject.toml"):
        (source / name).write_text(FILES[name] + "\n")
    broken = '\n[project.entry-points."lightning_fed.masks"]\nBroken = "middle:Nothing"\n'
    (source / "pyproject.toml").write_text(FILES["pyproject.toml"] + broken)
    words = ["-m", "pip", "-q", "install", str(source), "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, *words], check=True, env=environment(PIP_NO_INDEX="1"))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_middle.py"], check=True, cwd=source
    )
    return target


@pytest.mark.slow
def test_its_name_works_in_yaml(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "middle.yaml").write_text(FILES["middle.yaml"])
    words = [sys.executable, "-m", "lightning_fed", *FIT, "--config", "middle.yaml", "--trainer.name=run"]
    env = environment(PYTHONPATH=f"{installed}:{REPOSITORY}")
    fit = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert fit.returncode == 0, fit.stderr
    assert "Broken" not in fit.stderr, "nobody asked for it"
    config = (tmp_path / "runs/run/version_0/config.yaml").read_text()
    assert "class_path: middle.MiddleMean\n  init_args:\n    cut: 2\n" in config


# Says at its end whether the package was imported.
PROGRAM = """
import sys
from lightning_fed.cli import main
try:
    main(sys.argv[1:])
finally:
    print("imported:", "middle" in sys.modules)
"""


class Asked(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def ask(installed: Path, tmp_path: Path) -> Callable[..., Asked]:
    """Asks the program, where the packages are those in the folder and in ``tmp_path``.

    A process each: jsonargparse keeps the classes it has seen, and finds them by name from then on.
    """
    env = environment(PYTHONPATH=f"{installed}:{tmp_path}:{REPOSITORY}", COLUMNS="120")

    def ask(*words: str) -> Asked:
        command = [sys.executable, "-c", PROGRAM, *words]
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return Asked(ended.returncode, ended.stdout, ended.stderr)

    return ask


BROKEN = "Expected `Broken`, which middle-mean shares, to be loaded from middle:Nothing, but: AttributeError: module"


@pytest.mark.slow
def test_a_broken_one_stops_only_who_asks_for_it(ask: Callable[..., Asked]) -> None:
    failed = ask(*FIT, "--aggregator.mask=Broken")
    assert (failed.code, failed.err.splitlines()[-1].startswith(BROKEN)) == (2, True)
    shown = ask("fit", "--help")
    assert (shown.code, "MiddleMean" in shown.out, BROKEN in shown.err) == (0, True, True)
    mistyped = ask(*FIT, "--aggregator=MiddleMaen")
    assert ("did you mean MiddleMean" in mistyped.err, BROKEN in mistyped.err) == (True, True)


@pytest.mark.slow
def test_one_name_for_two_classes_is_refused(ask: Callable[..., Asked], tmp_path: Path) -> None:
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[lightning_fed.masks]\nMiddleMean = other:Mine\n")
    said = "packages share middle.MiddleMean and other.Mine: give its import path."
    assert ask(*FIT, "--aggregator=MiddleMean").err.splitlines()[-1].endswith(said)


@pytest.mark.slow
def test_under_safe_imports_it_is_not_imported(ask: Callable[..., Asked]) -> None:
    asked = ask(*FIT, "--aggregator=MiddleMean", "--safe_imports")
    assert (asked.code, asked.out) == (2, "imported: False\n")
    assert ask(*FIT, "--aggregator=MiddleMean", "--aggregator.cut=a").out == "imported: True\n"


def test_help_of_the_program_loads_no_package() -> None:
    code = "import sys; from lightning_fed.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'lightning_fed.cli.class_names')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
