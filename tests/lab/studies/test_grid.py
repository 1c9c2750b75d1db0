"""Choices of a tuning that are at an edge of what it offered: which they are, and where that is said."""

import csv
import io
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from lightning_fed.lab.common import csv_text
from lightning_fed.lab.studies.blocks import study_blocks, table_lines
from lightning_fed.lab.studies.cells import at_edge, edges_of
from lightning_fed.lab.studies.formats import as_latex, as_markdown
from lightning_fed.lab.studies.results import StudyResults, Trial
from lightning_fed.lab.studies.study import AxisValue, Name, Report, Space, Study, Tune
from lightning_fed.lab.studies.table import study_table
from tests.lab.studies.parts import study_run

RULES = ("FedAvg", "GMA", "FedYogi", "SCAFFOLD")
TUNE = Tune(
    parameters={"lr": [0.1, 0.01, 1], "wd": [0, 1e-3], "one": [3]}, by={"rule": {"GMA": {"tau": [0.2, 0.4, 0.6]}}}
)


@pytest.mark.parametrize(
    ("offered", "chosen", "side"),
    [
        ([0.1, 0.01, 1], 0.01, "smallest"),
        ([0.1, 0.01, 1], "1", "largest"),  # as tables have it
        ([0.1, 0.01, 1], 0.1, None),
        ([0.1, 0.01], 7, "largest"),  # whatever the file offers now
        ([0.1, 1], "0.10", "smallest"),
        (["1e-3", 1], "1e-3", "smallest"),  # YAML reads a text
        ([0.1], 0.1, None),
        ([True, False], "true", None),
        (["SGD", "Adam"], "Adam", None),
        ([None, 1.0], "null", None),
        ([[0.9, 0.99], [0.9, 0.999]], "[0.9, 0.99]", None),
        (Space(0.01, 1, log=True), 0.0125, "smallest"),
        (Space(0.01, 1, log=True), 0.0127, None),
        (Space(0.01, 1, log=True), 0.795, "largest"),
        (Space(-1, 1), -0.91, "smallest"),
        (Space(-1, 1), 0.89, None),
    ],
)
def test_an_edge_is_the_end_of_a_list_of_numbers_or_near_that_of_a_range(
    offered: Any, chosen: Any, side: str | None
) -> None:
    study = Study("T", tune=Tune(parameters={"x": offered}))
    assert edges_of(study, {}, {"x": chosen}) == ({"x": side} if side else {})
    assert edges_of(study, {}, {}) == {}


def tuned(chosen: dict[str, dict[str, str]]) -> tuple[Study, StudyResults]:
    """A study with runs of these choices by rule, and the trials that led to them."""
    axes = {Name("rule"): {Name(rule): AxisValue() for rule in chosen}}
    study = Study("T", "t", axes=axes, tune=TUNE, report=Report(baseline={"rule": Name("FedAvg")}))
    runs = [study_run(0, {"test/acc": {1: 0.5}}, options, rule=rule) for rule, options in chosen.items()]
    trials = [Trial({"rule": rule}, 0, options, {"val/acc best": 0.6}) for rule, options in chosen.items()]
    return study, StudyResults("t", "full", tuple(runs), tuple(trials))


SMALLEST, INSIDE = {"lr": "0.01", "wd": "0.001", "one": "3"}, {"lr": "0.1", "wd": "0", "one": "3", "tau": "0.4"}


def test_it_is_said_in_every_format_with_its_parameter_and_value() -> None:
    study, results = tuned({"FedAvg": SMALLEST, "GMA": INSIDE})
    table = study_table(study, results)
    blocks = study_blocks(study, results, table)
    clause = "lr 0.01, the smallest (FedAvg); wd 0.001, the largest (FedAvg); wd 0, the smallest (GMA)"
    told = f"Tuned to an edge of its grid: {clause}."
    assert blocks[0].note.startswith(told)
    assert f"\n\n{told}" in as_markdown(["T"], blocks, [])
    assert rf"{told}}}" in as_latex(["T"], blocks[:1], [])
    rows = list(csv.DictReader(io.StringIO(csv_text(table_lines(study, table)))))
    assert [row["at_edge"] for row in rows] == ["lr smallest; wd largest", "wd smallest"]
    assert blocks[-1].title == "Tuned options"
    assert [line[1] for line in blocks[-1].lines[1:]] == [
        "lr 0.01 (smallest), wd 0.001 (largest), one 3",
        "lr 0.1, wd 0 (smallest), one 3, tau 0.4",
    ]


def test_nothing_is_said_of_what_is_inside() -> None:
    study, results = tuned({"FedAvg": {"lr": "0.1", "one": "3"}, "GMA": {"lr": "0.1", "tau": "0.4"}})
    table = study_table(study, results)
    blocks = study_blocks(study, results, table)
    assert "edge" not in blocks[0].note
    assert "est)" not in blocks[-1].lines[1][1]
    assert {line[-1] for line in table_lines(study, table)[1:]} == {""}
    untuned = replace(results, runs=tuple(replace(run, chosen={}) for run in results.runs), trials=())
    assert not any("edge" in block.note for block in study_blocks(study, untuned, study_table(study, untuned)))


def test_many_choices_are_counted_and_one_alone_has_no_name() -> None:
    study, results = tuned(dict.fromkeys(RULES, SMALLEST))
    chosen = [(run.axes, run.chosen) for run in results.runs]
    assert at_edge(study, chosen) == "lr 0.01, the smallest (4 of 4 choices); wd 0.001, the largest (4 of 4 choices)"
    rates = {f"R{at}": {"lr": lr, "tau": tau} for at, (lr, tau) in enumerate(product(["0.01", "1", "0.1"], "12"))}
    many = replace(
        study, tune=replace(TUNE, parameters={"lr": [0.01, 0.1, 1], "tau": [*range(1, 7)], "mu": [*range(9)]})
    )
    mixed = [({"rule": rule}, {**options, "mu": "80"[at % 2]}) for at, (rule, options) in enumerate(rates.items())]
    assert at_edge(many, mixed) == (
        "tau 1, the smallest (R0; R2; R4); mu 8, the largest (R0; R2; R4); mu 0, the smallest (R1; R3; R5); "
        "lr 0.01, the smallest (R0; R1); 1 more"
    )
    one = replace(study, tune=replace(TUNE, per=[]))
    assert at_edge(one, chosen) == "lr 0.01, the smallest; wd 0.001, the largest"
