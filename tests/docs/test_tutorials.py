"""The notebooks run from the first cell to the last, and hold the outputs of such a run."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import REPOSITORY, anchors

NOTEBOOKS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.ipynb"))
# One line of each output, as a cell shows it after what the bar has overwritten.
OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def forms(cell: Any) -> list[str]:
    """The forms of what a cell shows, without lines of text and bars."""
    shown = [output["data"] for output in cell["outputs"] if "data" in output]
    return sorted(form for data in shown for form in data if "widget" not in str(data))


def lines(cell: Any) -> list[str]:
    """The lines of text that a cell ends with."""
    text = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    return [line for line in OVERWRITTEN.sub("", text).splitlines() if line.strip()]


def run(path: Path, folder: Path) -> Any:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for package in ("ipykernel", "pandas"):
        pytest.importorskip(package)
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()


@pytest.fixture
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is found, the package is this one, and W&B keeps nothing."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_shows_what_is_stored(path: Path, tmp_path: Path) -> None:
    done = [cell for cell in run(path, tmp_path).cells if cell["cell_type"] == "code"]
    assert [forms(cell) for cell in done] == [forms(cell) for cell in cells(path, "code")]
    if path.stem == "first-run":
        fits = [lines(cell) for cell in done if ".fit(" in cell["source"]]
        assert len(fits[0]) > 5, "the layers, the engine, the bar and the run"
        assert [line.split()[0] for line in fits[1]] == ["Rounds:", "40"], "nothing that was said before"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_run(path: Path) -> None:
    found = cells(path, "code")
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1)), "run all cells, in order"
    kinds = {output["output_type"] for cell in found for output in cell["outputs"]}
    assert {"stream"} < kinds <= {"stream", "execute_result", "display_data"}
    stored = json.dumps([cell["outputs"] for cell in found])
    assert re.findall(r"widget-view|/(?:home|root|tmp|work|Users)/\w*", stored) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere_and_the_page_is_in_the_navigation(path: Path) -> None:
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = path.parent / target
        assert "://" in link or (file.is_file() and (not anchor or anchor in anchors(file))), link
    assert f": tutorials/{path.name}\n" in (REPOSITORY / "mkdocs.yml").read_text()
