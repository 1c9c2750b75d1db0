"""A study as runs: the product of its axes without what is left out, and the words of each."""

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.studies.cells import Cell, cells_of, chosen_by, make_cell
from lightning_fed.lab.studies.study import AxisValue, Name, Study

RULES = {"FedAvg": AxisValue(), "GMA": AxisValue(["aggregator/gma"], {"aggregator.lr": 2})}
RATES = {str(rate): AxisValue(set={"model.optimizer.lr": rate}) for rate in (0.1, 1e-05)}
STUDY = Study(
    "T", configs=["quickstart"], set={"trainer.max_rounds": 3, "trainer.name": None},
    axes={"rule": RULES, "rate": RATES}, without=[{"rule": [Name("FedAvg")], "rate": [Name("0.1")]}], seeds=[0, 7],
)  # fmt: skip


def test_the_product_without_what_is_left_out() -> None:
    assert [(*cell.axes.values(), cell.seed) for cell in cells_of(STUDY)] == [
        ("FedAvg", "1e-05", 0), ("FedAvg", "1e-05", 7), ("GMA", "0.1", 0), ("GMA", "0.1", 7), ("GMA", "1e-05", 0),
        ("GMA", "1e-05", 7),
    ]  # fmt: skip


def test_what_comes_later_is_laid_over() -> None:
    options = {"aggregator.lr": 0.5, "data": {"class_path": "Digits"}}
    cell = make_cell(STUDY, {"rule": Name("GMA"), "rate": Name("1e-05")}, 7, options)
    assert cell.words == (
        "fit", "--config", "quickstart", "--trainer.max_rounds=3", "--trainer.name=null", "--config", "aggregator/gma",
        "--aggregator.lr=2", "--model.optimizer.lr=1e-05", "--aggregator.lr=0.5", '--data={"class_path": "Digits"}',
        "--seed_everything=7",
    )  # fmt: skip
    assert cell.options == options
    assert cell.folder.startswith("rule=GMA,rate=1e-05/aggregator.lr=0.5,data=")
    assert cell.folder.endswith("/seed7")


def test_a_value_may_name_the_seed() -> None:
    study = Study(
        "T", set={"weights": "models/seed{seed}.ckpt"}, axes={"rule": {"a": AxisValue(["{seed}.yaml"])}}, seeds=[0, 7]
    )
    assert [cell.words for cell in cells_of(study)] == [
        ("fit", f"--weights=models/seed{seed}.ckpt", "--config", f"{seed}.yaml", f"--seed_everything={seed}")
        for seed in (0, 7)
    ]
    assert [cell.folder for cell in cells_of(study)] == ["rule=a/seed0", "rule=a/seed7"]


def test_each_run_has_a_folder_of_its_own() -> None:
    folders = [cell.folder for cell in cells_of(STUDY)]
    assert folders[0] == "rule=FedAvg,rate=1e-05/seed0"
    assert len(set(folders)) == 6
    values = {name: AxisValue() for name in ("a b", "a/b", "a_b", "x" * 300)}
    folders = [cell.folder for cell in cells_of(Study("T", axes={"c": values}))]
    assert len(set(folders)) == 4
    assert all(len(folder) < 200 and folder.count("/") == 1 for folder in folders)
    assert [cell.folder for cell in cells_of(Study("T"))] == ["run/seed0"]


def test_values_with_the_letters_between_values_share_no_folder() -> None:
    axes = {"a": {"1,b=2": AxisValue(), "1": AxisValue()}, "b": {"3": AxisValue(), "2,b=3": AxisValue()}}
    assert len({cell.folder for cell in cells_of(Study("T", axes=axes))}) == 4


@pytest.mark.parametrize(
    ("only", "count"),
    [(None, 6), ("rule=GMA", 4), ("rule=G*,rate=0.1", 2), ("seed=7", 3), ("rule=FedAvg,rule=GMA,seed=0", 3)],
)
def test_patterns_choose(only: str | None, count: int) -> None:
    assert len(chosen_by(cells_of(STUDY), only)) == count


@pytest.mark.parametrize(("only", "said"), [("rle=A", r"axes of the study \(rule, rate, seed\), got 'rle=A'"),
                                            ("GMA", "got 'GMA'"), ("rule=A", "none of 6 fits 'rule=A'")])  # fmt: skip
def test_patterns_that_choose_nothing(only: str, said: str) -> None:
    cells: list[Cell] = cells_of(STUDY)
    with pytest.raises(FederatedError, match=said):
        chosen_by(cells, only)


def test_two_runs_in_one_folder_are_refused() -> None:
    """As they would be where capital letters are small ones too."""
    study = Study("T", axes={"c": {"a": AxisValue(), "A": AxisValue()}})
    with pytest.raises(FederatedError, match="but c A, seed 0 and c a, seed 0 would share one: name the values of"):
        cells_of(study)
