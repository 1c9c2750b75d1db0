"""What pages say of the package, of its speed and of its tables is what code, one run and today's report say."""

import json
import re
from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed import aggregators, client_algorithms, data, masks
from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.studies.blocks import heading, study_blocks
from lightning_fed.lab.studies.formats import as_markdown
from lightning_fed.lab.studies.results import StudyResults
from lightning_fed.lab.studies.study import Study
from lightning_fed.lab.studies.table import study_table
from tests.docs.pages import REPOSITORY, blocks
from tests.docs.test_tutorials import cells, lines
from tests.lab.studies.parts import study_run

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
# What others derive from, or fill with files of their own.
NO_METHOD = {"Attack", "ClientAlgorithm", "LossAlgorithm", "FederatedDataModule", "Arrays", "ImageFolders"}


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def public(room: Any, base: type) -> list[type]:
    """The classes of a room that a user can name."""
    found = [getattr(room, name) for name in room.__all__ if name not in NO_METHOD]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, base) and not isabstract(kind)]


def test_readme_counts_what_the_package_has() -> None:
    counts = {
        "server rules": len(public(aggregators, aggregators.Aggregator)),
        "masks": len(public(masks, masks.Mask)),
        "client algorithms": len(public(client_algorithms, client_algorithms.ClientAlgorithm)),
        "ways to split data": len(public(data, data.Partitioner)),
        "data sets": len(public(data, data.FederatedDataModule)),
    }
    said = {what: int(number) for number, what in re.findall(rf"(\d+) ({'|'.join(counts)})\b", README)}
    assert said == counts


def test_readme_is_a_screen() -> None:
    assert len(README.splitlines()) <= 64


def test_all_pages_quote_one_run_of_one_loop() -> None:
    peers = page("performance.md").partition("<!-- peers: begin -->")[2].partition("<!-- peers: end -->")[0]
    rows = re.findall(
        r"^\| ([\w-]+) \| .+? \| (\w[\w ]*?) [\d.]+ m?s \| ([\d.]+) × \| ([\d.]+) – ([\d.]+) \|", peers, re.M
    )
    assert {against for _, against, *_ in rows} == {"plain"}
    ratios = {key: (ratio, low, high) for key, _, ratio, low, high in rows}
    line = next(line for line in README.splitlines() if line.startswith("| default options are fast"))
    quoted = [ratios[key][0] for key in ("A-lightning_fed", "B-lightning_fed", "A-flower", "B-flower")]
    assert re.findall(r"([\d.]+) ×", line) == quoted
    table = page("beside-others.md").partition("## Speed")[2]
    contestants = ("lightning_fed", "fedlab", "pfl", "flower")
    for name, work, processes in re.findall(r"^\| ((\w)(?:: [^|]+|, (two) processes)) \|", table, re.M):
        found = next(line for line in table.splitlines() if line.startswith(f"| {name} |")).split(" | ")[1:]
        for contestant, cell in zip(contestants, found, strict=True):
            key = f"{work}-{contestant}" + ("-2" if processes else "")
            shown = [float(number) for number in re.findall(r"[\d.]+", cell)]
            assert ("not run" in cell) == (key not in ratios), key
            assert shown == pytest.approx([float(n) for n in ratios.get(key, ())], rel=0.005), key


def test_concepts_names_the_rules_that_take_no_mask() -> None:
    refusing = {kind for kind in public(aggregators, aggregators.Aggregator) if getattr(kind, "mask_refusal", None)}
    others = {kind.__name__ for kind in refusing if not kind.__module__.endswith(".robust")}
    assert any(kind.__module__.endswith(".robust") for kind in refusing)
    sentence = re.search(r"the mask `m` with all but the robust ones(.+?)\.\n? ", page("concepts.md"), re.S)
    assert sentence is not None
    assert set(re.findall(r"\[(\w+)\]", sentence[1])) == others


def words(text: str) -> list[str]:
    """The lines of a report without its numbers, and the stars that depend on them."""
    return [re.sub(r"(\\< )?[-+]?\d[\d.]*(\\\*)*", "0", line.strip()) for line in text.splitlines() if line.strip()]


def report_of(study: Study) -> list[str]:
    """What the report of a study says, whatever its runs came to."""
    axis, values = next(iter(study.axes.items()))
    runs = []
    for shift, each in enumerate(values):
        for seed in study.seeds:
            curve = {at: 0.5 - (at - 15) ** 2 / 1e3 + shift * (0.1 + (at + 7 * seed) % 5 / 1e2) for at in range(21)}
            runs.append(study_run(seed, {"test/acc": curve}, **{axis: each}))
    results = StudyResults(study.name, "full", tuple(runs), ())
    table = study_table(study, results)
    return words(as_markdown(heading(study, results), study_blocks(study, results, table, ""), table.notes))


def test_the_quickstart_shows_what_a_report_prints_today() -> None:
    shown = words(
        next(block.text for block in blocks(REPOSITORY / "docs" / "quickstart.md") if block.language == "text")
    )
    assert shown == [line for line in report_of(load_study("quickstart", "full")) if line[:2] != "# "]


def test_the_tutorial_shows_what_a_report_prints_today(tmp_path: Path) -> None:
    found = cells(REPOSITORY / "docs" / "tutorials" / "own-aggregator.ipynb", "code")
    text = next("".join(cell["source"]) for cell in found if "%%writefile fedexp.yaml" in "".join(cell["source"]))
    report = next(cell for cell in found if "report --study" in "".join(cell["source"]))
    options = {**yaml.safe_load(text.partition("\n")[2]), "set": {}, "axes": {"rule": {"FedAvg": {}, "FedExP": {}}}}
    (tmp_path / "fedexp.yaml").write_text(json.dumps(options))
    shown = words("\n".join(lines(report)))
    assert shown[-1].startswith("written: ")
    assert shown[:-1] == report_of(load_study(str(tmp_path / "fedexp.yaml"), "full"))
