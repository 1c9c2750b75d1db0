"""Texts of somebody else's stay what they are in a terminal, a table, a picture and a spreadsheet."""

import csv
import io
import json
import os
from pathlib import Path

import pytest

from lightning_fed.core import one_line
from lightning_fed.errors import FederatedError
from lightning_fed.lab.common import csv_text, no_formula
from lightning_fed.lab.report.plots import panels_figure
from lightning_fed.lab.report.runs import Method, load_runs
from lightning_fed.lab.studies.formats import Block, as_latex, as_markdown

HOSTILE = ["a\nb", "a | b", "5**", "\x1b[31mred\x1b[0m", "\u202eback", "$x$", "=1+1", "\ud800", "<b>", "100 %"]


def write_run(folder: Path, label: str) -> Path:
    run = folder / "version_0"
    run.mkdir(parents=True)
    facts = {"fingerprint": "f", "group": "g", "label": label, "name": "n", "seed": 0, "wandb_id": "w", "created": 1.0}
    (run / "run.json").write_text(json.dumps(facts))
    (run / "metrics.csv").write_text("round,val/acc\n0,0.1\n1,0.2\n")
    return run


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_one_line_and_one_cell(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, name)
    ((run,), _) = load_runs([tmp_path])
    assert run.label.isprintable()
    run.label.encode()
    block = Block("title " + name, [["method", "acc " + name], [name, "0.5**"]], 1)
    text = as_markdown(["study " + name, "about " + name], [block], ["note " + name])
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == 7
    assert all(len(line.replace(r"\|", "").split("|")) == 4 for line in lines[3:6])
    latex = as_latex(["study " + name], [block], [])
    row = next(line for line in latex.splitlines() if line.startswith(("\\midrule",)))
    after = latex.splitlines()[latex.splitlines().index(row) + 1]
    assert after.endswith(r"0.5$^{**}$ \\")
    assert "$^{" not in after.split(" & ")[0]
    caption, head = (line for line in latex.splitlines() if line.startswith((r"\caption", "method")))
    assert "$^{" not in caption + head
    panels_figure({("", "val/acc"): {0: Method(run.label + " $\\bad{$", (run,))}}).canvas.draw()


@pytest.mark.parametrize(
    "cell",
    ["=1+1", "@x", "+cmd", "-cmd", "-2+3+cmd|' /C calc'!A0", '+1+HYPERLINK("http://x")', " =1+1", "\n=1", "\uff1d1+1"],
)
def test_no_cell_is_a_formula(cell: str) -> None:
    ((first, number),) = csv.reader(io.StringIO(csv_text([[cell, "-0.5"]])))
    assert (first, number) == ("'" + cell, "-0.5")
    kept = ["-1e-3", "+2", "-inf", "a=b", "", "-0.3 ± 0.1", "+0.5 (-0.1 to +0.9)*"]
    assert list(map(no_formula, kept)) == kept
    assert one_line("a\tb") == "a b"


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "brackets"])
@pytest.mark.parametrize("file", ["run.json", "metrics.csv"])
def test_what_is_no_file_is_left_out_and_not_waited_for(tmp_path: Path, file: str, kind: str) -> None:
    path = write_run(tmp_path, "x") / file
    path.unlink()
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "brackets":
        path.write_text("[" * 100_000)
    else:
        path.mkdir()
    with pytest.raises(FederatedError, match="found no run with measurements"):
        load_runs([tmp_path])
