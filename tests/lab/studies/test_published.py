import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.studies.published import Figure, published_files, read_published
from tests.faults.damage import become_a_pipe

AXES = {
    "client rate": ["0.001", "0.01", "0.10", "0.3"],
    "server rate": ["1", "1.5"],
    "rule": ["FedAvg", "FedAvg+GMA", "SCAFFOLD"],
}
RATES = {"client rate": "client_lr", "server rate": "server_lr"}
RULES = {"FedAvg": {"aggregation": "AVG"}, "FedAvg+GMA": {"aggregation": "gma"}}


@pytest.mark.parametrize("name", published_files())
def test_every_file_is_read_and_tells_its_figures_apart(name: str) -> None:
    path = published_files()[name]
    header, *lines = path.read_text().splitlines()
    columns = header.split(",")
    assert columns[0] == "table"
    assert columns[-2:] == ["value", "std"]
    # With a value of each column as an axis each row is one figure.
    rows = [dict(zip(columns, line.replace(", ", " ").split(","), strict=True)) for line in lines]
    axes = {column: list(dict.fromkeys(row[column] for row in rows)) for column in columns[1:-2]}
    figures = read_published({"file": name, "axes": {column: column for column in axes}}, axes)
    found = [figures.figure(row) for row in rows]
    assert [f and f.value for f in found] == [float(row["value"]) for row in rows]
    assert all(0 < figure.value < 100 for figure in found if figure)
    assert figures.table.replace(",", "") == rows[0]["table"].strip('"')


def test_a_cell_that_was_misread_once() -> None:
    where = {"dataset": "FedCMNIST", "split": "iid", "num_clients": 100, "algorithm": "FedAvg", "aggregation": "avg"}
    assert read_published({"file": "gma_table3", "where": where}, {}).figure({}) == Figure(89.88, 0.32)


def test_figures_are_found_by_columns_and_by_values() -> None:
    figures = read_published({"file": "gma_table10", "axes": {**RATES, "rule": RULES}}, AXES)
    cell = {"client rate": "0.10", "server rate": "1", "momentum": "0.9"}
    assert figures.table == "GMA, Table 10"
    assert figures.figure({**cell, "rule": "FedAvg"}) == Figure(88.31, None)
    assert figures.figure({**cell, "rule": "FedAvg+GMA"}) == Figure(88.4, None)
    assert figures.figure({**cell, "rule": "SCAFFOLD"}) is None
    assert figures.figure({**cell, "client rate": "0.3", "rule": "FedAvg"}) is None


def test_of_several_metrics_the_figures_are_of_the_first_unless_they_say_which() -> None:
    axes = {**AXES, "metric": ["test/acc", "test/loss"], "statistic": ["best"]}
    cell = {"client rate": "0.10", "server rate": "1", "rule": "FedAvg", "statistic": "best"}
    figures = read_published({"file": "gma_table10", "axes": {**RATES, "rule": RULES}}, axes)
    assert figures.figure({**cell, "metric": "test/acc"}) == Figure(88.31, None)
    assert figures.figure({**cell, "metric": "test/loss"}) is None


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("table,method,value,std\nOurs,A,0.5,0.1\n")
    assert read_published({"file": str(path), "where": {"method": "a"}}, {}).figure({}) == Figure(0.5, 0.1)
    path.write_text("method,value\nA,x\n")
    with pytest.raises(FederatedError, match=r"^Expected .*mine.csv to be a table with the columns table, value, std"):
        read_published({"file": str(path)}, {})
    become_a_pipe(path, random.Random(0))
    with pytest.raises(FederatedError, match=r"^Expected .*mine.csv to be a table .* but it cannot be read"):
        read_published({"file": str(path)}, {})


@pytest.mark.parametrize(
    ("published", "sentence"),
    [
        ({"where": {}}, "Expected `report.published` to name a `file` of figures, got none."),
        ({"file": "gma_table11"}, "Expected `report.published.file` to be one of cgw_table1, .*, got 'gma_table11'."),
        ({"file": "gma_table8", "rows": []}, r"`report.published` to name its keys \(file, where, axes\), got 'rows'."),
        ({"file": "gma_table8", "where": {"clients": 10}}, r"where` to name columns of the file \(num_clients"),
        ({"file": "gma_table8", "where": {"num_clients": 11}}, "published.where.num_clients` to be one of 10, 50"),
        ({"file": "gma_table8", "where": [1]}, "Expected `report.published.where` to be a mapping"),
        ({"file": "gma_table10", "axes": {"rate": "client_lr"}}, r"published.axes` to name axes of the study \(client"),
        ({"file": "gma_table10", "axes": {"rule": "method"}}, r"axes.rule` to name columns of the file \(server_lr"),
        ({"file": "gma_table10", "axes": {"rule": {"GMA": {}}}}, r"to name values of 'rule' \(FedAvg, .*got 'GMA'"),
        ({"file": "gma_table10", "axes": {"rule": {"FedAvg": "avg"}}}, "a mapping from columns to values, got 'avg'"),
        ({"file": "gma_table10", "axes": {"rule": {"FedAvg": {"aggregation": "x"}}}}, "to be one of avg, gma, got 'x'"),
        ({"file": "gma_table10", "axes": {"rule": "aggregation"}}, "to select figures of gma_table10, got none"),
        ({"file": "gma_table10", "axes": RATES}, "one figure of GMA, Table 10 .*got 2 that differ in aggregation"),
    ],
)  # fmt: skip
def test_what_names_nothing_is_refused(published: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(FederatedError, match=sentence) as error:
        read_published(published, AXES)
    assert str(error.value).count(". ") == 0
