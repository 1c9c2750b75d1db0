"""Tuning: trials by Optuna's samplers, the choice by the mean of what decides, and the runs with what is chosen."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack.options import AttackOptions
from lightning_fed.lab.runner import command, record, tuning
from lightning_fed.lab.runner.executors import Outcome, Pool
from lightning_fed.lab.runner.record import done_run, measured_run, write_record
from lightning_fed.lab.runner.report import collect
from lightning_fed.lab.runner.tuning import expect_sound_stages, groups_of, tune, tuned_together, with_choices
from lightning_fed.lab.studies.cells import Cell, cells_of, combinations, make_cell
from lightning_fed.lab.studies.results import read_results, write_results
from lightning_fed.lab.studies.study import AxisValue, Name, Space, Study, Tune, expect_sound
from lightning_fed.runs.folder import create_run
from lightning_fed.runs.lock import RunLock

RULES = {"A": AxisValue(), "B": AxisValue(set={"x": 1})}
MASKS = {"none": AxisValue(), "some": AxisValue(set={"y": 1})}
GRID = Tune(
    parameters={"lr": [0.1, 1.0]}, by={"rule": {"B": {"mu": [1, 2, 3]}}}, seeds=[0, 5], per=["rule"],
    at={"mask": Name("none")}, statistic="final",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record._values_of.cache_clear()


def study(tune: Tune = GRID) -> Study:
    return Study("T", "t", axes={"rule": RULES, "mask": MASKS}, seeds=[0, 1], tune=tune)


def trainer(
    root: Path,
    value: Callable[[Cell], float | None],
    diverges: Callable[[Cell], bool] = lambda cell: False,
    metric: str = "val/acc",
) -> Callable[[Sequence[Cell]], Outcome]:
    """Stands in for processes: a run comes to a value, or fails where that is None."""

    def train(cells: Sequence[Cell], ended: Callable[[Cell, bool], object] = lambda cell, early: None) -> Outcome:
        for cell in (cell for cell in cells if done_run(root, cell) is None and value(cell) is not None):
            with RunLock() as lock:
                run = create_run(root, cell.folder, {"words": cell.words}, "label", cell.seed, lock)
            run.metrics.write_text(f"round,{metric},test/acc\n0,0.9,0.1\n1,{value(cell)},0.7\n")
            write_record(root, cell, run, diverges(cell))
            ended(cell, False)
        return Outcome([cell for cell in cells if value(cell) is None])

    return train


def best_at(cell: Cell) -> float | None:
    """Rate 1 is best for A, rate 0.1 with mu 2 for B in the mean over seeds, rate 1 with mu 3 for seed 0 alone."""
    lr, mu = float(cell.options["lr"]), cell.options.get("mu")
    if mu is None:
        return 0.1 * lr
    return 0.8 * (lr == 0.1 and mu == 2) + 0.9 * (lr == 1 and mu == 3 and cell.seed == 0)


def test_the_grid_of_each_group_is_tried_and_the_mean_over_seeds_chooses(tmp_path: Path) -> None:
    groups = groups_of(study(), cells_of(study()), tmp_path)
    assert [group.values for group in groups] == [{"rule": "A"}, {"rule": "B"}]
    assert tune(groups, trainer(tmp_path, best_at), 2) == Outcome()
    tried = [sorted(tuple(one.options.values()) for one in group.asked()) for group in groups]
    assert tried == [[(0.1,), (1.0,)], [(lr, mu) for lr in (0.1, 1.0) for mu in (1, 2, 3)]]
    for attempt in (one for group in groups for one in group.asked()):
        assert [(cell.axes["mask"], cell.seed) for cell in attempt.cells] == [("none", 0), ("none", 5)]
    tuned, undecided = with_choices(study(), cells_of(study()), groups)
    assert undecided == []
    assert {(cell.axes["rule"], *cell.options.values()) for cell in tuned} == {("A", 1.0), ("B", 0.1, 2)}
    assert len(tuned) == 8
    (reused,) = [cell for cell in tuned if cell.axes == {"rule": "A", "mask": "none"} and cell.seed == 0]
    assert done_run(tmp_path, reused) is not None  # the trial that was chosen
    assert reused.words[-2:] == ("--lr=1.0", "--seed_everything=0")


def test_trials_are_not_attacked_and_the_run_of_a_chosen_one_is(tmp_path: Path) -> None:
    one = replace(study(), attack=AttackOptions(samples=40))
    groups = groups_of(one, cells_of(one), tmp_path)
    assert tune(groups, trainer(tmp_path, best_at), 2) == Outcome()
    trials = {cell.folder: cell for group in groups for attempt in group.asked() for cell in attempt.cells}
    assert {cell.attack for cell in trials.values()} == {None}
    tuned, _ = with_choices(one, cells_of(one), groups)
    assert {cell.attack for cell in tuned} == {AttackOptions(samples=40)}
    chosen = next(cell for cell in tuned if cell.folder in trials)
    run = done_run(tmp_path, trials[chosen.folder])
    assert run is not None
    assert done_run(tmp_path, chosen) is None  # it has been trained, but not attacked
    (run.path / "attack.csv").write_text("attack\n")
    write_record(tmp_path, chosen, run)
    assert done_run(tmp_path, chosen) == run
    assert done_run(tmp_path, trials[chosen.folder]) == run  # a second start does not try it again


def test_a_second_start_tries_what_has_failed_and_nothing_else(tmp_path: Path) -> None:
    calls: list[list[Cell]] = []

    def train(cells: Sequence[Cell], ended: Callable[[Cell, bool], object]) -> Outcome:
        calls.append([cell for cell in cells if done_run(tmp_path, cell) is None])
        return trainer(tmp_path, lambda cell: None if cell.options["lr"] == 1.0 and len(calls) == 1 else best_at(cell))(
            cells
        )

    only = Study("T", "t", axes={"rule": RULES}, tune=Tune(parameters={"lr": [0.1, 1.0]}, statistic="final"))
    first = groups_of(only, cells_of(only), tmp_path)
    assert len(tune(first, train, 1).failed) == 2
    assert {cell.options["lr"] for cell in with_choices(only, cells_of(only), first)[0]} == {0.1}
    second = groups_of(only, cells_of(only), tmp_path)
    assert tune(second, train, 1).failed == []
    assert [len(one) for one in calls] == [4, 2]
    assert {cell.options["lr"] for cell in with_choices(only, cells_of(only), second)[0]} == {1.0}


def test_what_has_diverged_is_not_chosen_and_counts_as_lost_whatever_it_had_reached(tmp_path: Path) -> None:
    only = Study("T", "t", axes={"rule": RULES}, tune=Tune(parameters={"lr": [0.1, 1.0]}, per=[], statistic="final"))
    groups = groups_of(only, cells_of(only), tmp_path)
    train = trainer(tmp_path, best_at, diverges=lambda cell: cell.options["lr"] == 1.0 or cell.seed == 1)
    assert tune(groups, train, 1) == Outcome()
    tuned, _ = with_choices(only, [*cells_of(only)], groups)
    assert {cell.options["lr"] for cell in tuned} == {0.1}
    lost = replace(tuned[0], seed=1, folder="lost")
    train([lost])
    kept, left = (run.columns if (run := measured_run(tmp_path, cell)) else {} for cell in (tuned[0], lost))
    assert list(kept["test/acc"].values()) == [0.1, 0.7]
    assert list(left["test/acc"].values()) == [0.1, 0.7, math.nan]


def test_of_a_grid_the_first_combinations_may_be_all(tmp_path: Path) -> None:
    few = Study("T", "t", tune=Tune(parameters={"lr": [0.1, 1.0], "mu": [1, 2]}, trials=3))
    (group,) = groups_of(few, cells_of(few), tmp_path)
    assert len(group.planned(1)) == 3
    tune([group], trainer(tmp_path, best_at), 1)
    assert [tuple(one.options.values()) for one in group.asked()] == [(0.1, 1), (0.1, 2), (1.0, 1)]


def test_nothing_is_chosen_where_all_fail(tmp_path: Path) -> None:
    groups = groups_of(study(), cells_of(study()), tmp_path)
    tune(groups, trainer(tmp_path, lambda cell: None if cell.axes["rule"] == "A" else 0.5), 2)
    tuned, undecided = with_choices(study(), cells_of(study()), groups)
    assert {cell.axes["rule"] for cell in tuned} == {"B"}
    assert {cell.axes["rule"] for cell in undecided} == {"A"}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("per", [["rule"], ["rule", "mask"], ["mask", "seed"]])
def test_shares_are_all_of_the_runs_and_what_is_tuned_together_is_in_one(count: int, per: list[str]) -> None:
    cells = cells_of(study())
    shares = [command._share(cells, f"{number + 1}/{count}", per) for number in range(count)]
    assert sorted(cell.folder for share in shares for cell in share) == sorted(cell.folder for cell in cells)
    keys = [{tuple({**cell.axes, "seed": cell.seed}[axis] for axis in per) for cell in share} for share in shares]
    assert sum(map(len, keys)) == len(set[object]().union(*keys))
    assert max(map(len, keys)) - min(map(len, keys)) <= 1


def test_few_runs_have_every_value_of_every_axis_and_option() -> None:
    rates, widths = ({Name(f"{value}"): AxisValue() for value in range(count)} for count in (4, 3))
    many = Study("T", "t", axes={"rule": RULES, "rate": rates, "width": widths}, seeds=[0, 1, 2])
    cells = [make_cell(many, cell.axes, cell.seed, {"lr": lr}) for cell in cells_of(many) for lr in (0.1, 1.0)]
    few = list(command.telling_runs(cells))
    seen = {(name, str(value)) for cell in few for name, value in {**cell.axes, **cell.options}.items()}
    assert len(seen) == 2 + 4 + 3 + 2
    assert len(few) < 10
    for cell in few:  # in each of them one axis alone differs from the first
        assert sum(value != few[0].axes[axis] for axis, value in cell.axes.items()) < 2


def test_other_samplers_draw_from_ranges(tmp_path: Path) -> None:
    space: Tune = Tune(
        parameters={"lr": Space(0.01, 1, log=True), "kind": ["a", "b"]}, sampler="tpe", trials=4, statistic="final"
    )
    one = Study("T", "t", axes={}, tune=space)
    (group,) = groups_of(one, cells_of(one), tmp_path)
    tune([group], trainer(tmp_path, lambda cell: float(cell.options["lr"])), 2)
    assert len(group.asked()) == 4
    assert all(0.01 <= attempt.options["lr"] <= 1 and attempt.options["kind"] in "ab" for attempt in group.asked())
    choice = group.choice()
    assert choice is not None
    assert choice.options["lr"] == max(attempt.options["lr"] for attempt in group.asked())
    endless = Study("T", "t", tune=Tune(parameters={"lr": Space(0.01, 1)}, sampler="tpe"))
    with pytest.raises(FederatedError, match="Expected `tune.trials`, as ranges have no last"):
        tune(groups_of(endless, cells_of(endless), tmp_path / "other"), trainer(tmp_path, best_at), 1)


@pytest.mark.parametrize(("metric", "sign"), [("val/acc", -1), ("val/loss", 1)])
def test_tpe_learns_from_what_it_is_told(tmp_path: Path, metric: str, sign: int) -> None:
    """Optuna's first ten trials are random, the next ones near the best of them."""
    space = Tune(parameters={"lr": Space(0.0, 10.0)}, metric=metric, sampler="tpe", trials=30, statistic="final")
    one = Study("T", "t", axes={}, tune=space)
    (group,) = groups_of(one, cells_of(one), tmp_path)
    tune([group], trainer(tmp_path, lambda cell: sign * abs(float(cell.options["lr"]) - 3), metric=metric), 1)
    far = [abs(attempt.options["lr"] - 3) for attempt in group.asked()]
    assert fmean(far[10:]) < 0.75 * 2.9  # what random values are away in the mean: (3^2 + 7^2) / 20


def test_tpe_asks_for_the_same_after_any_stop(tmp_path: Path) -> None:
    """A program that is started again has no sampler that remembers, as if each had asked for the first trials."""
    tried = {}
    for steps in ([13], [3, 4, 12, 13], [*range(1, 14)]):
        for most in steps:
            few = Tune(parameters={"lr": Space(0.0, 10.0)}, sampler="tpe", trials=most, statistic="final")
            one, root = Study("T", "t", axes={}, tune=few), tmp_path / str(len(steps))
            (group,) = groups_of(one, cells_of(one), root)
            tune([group], trainer(root, lambda cell: -abs(float(cell.options["lr"]) - 3)), 1)
        tried[len(steps)] = [attempt.options["lr"] for attempt in group.asked()]
    assert tried[1] == tried[4] == tried[13]
    assert len(set(tried[1])) == 13


def test_what_a_sampler_proposes_twice_is_one_trial_of_the_table(tmp_path: Path) -> None:
    few = Tune(parameters={"lr": [0.1, 0.2, 0.3, 0.4]}, sampler="tpe", trials=4, statistic="final")
    one = Study("T", "t", axes={}, tune=few)
    (group,) = groups_of(one, cells_of(one), tmp_path)
    tune([group], trainer(tmp_path, lambda cell: float(cell.options["lr"])), 1)
    asked = [attempt.options["lr"] for attempt in group.asked()]
    assert len(set(asked)) < len(asked) == 4
    trials = collect(one, "full", tmp_path)[0].trials
    assert sorted(float(trial.options["lr"]) for trial in trials) == sorted(set(asked))


@pytest.mark.parametrize(
    "change", [{"metric": "val/loss"}, {"statistic": "best"}, {"seeds": [1]}, {"pruner": "median"}]
)
def test_trials_with_another_aim_are_others(tmp_path: Path, change: dict[str, Any]) -> None:
    grid = Tune(parameters={"lr": [0.1, 1.0]}, statistic="final")
    for aim, count in ((grid, 2), (replace(grid, **change), 0), (grid, 2)):
        one = Study("T", "t", axes={}, tune=aim)
        (group,) = groups_of(one, cells_of(one), tmp_path)
        if not (tmp_path / "tuning.log").exists():
            tune([group], trainer(tmp_path, lambda cell: 1.0), 1)
        assert len(group.asked()) == count


def test_who_starts_it_meanwhile_asks_for_no_more_than_there_are_to_be(tmp_path: Path) -> None:
    few = Tune(parameters={"lr": Space(0.01, 1)}, sampler="tpe", trials=4)
    one = Study("T", "t", axes={}, tune=few)
    groups = [group for _ in range(8) for group in groups_of(one, cells_of(one), tmp_path)]
    groups[0].asked()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda group: group.ask(4), groups))
    assert [len(group.asked()) for group in groups] == [4] * 8


@pytest.mark.parametrize("sampler", ["grid", "tpe"])
@pytest.mark.parametrize("url", [None, "sqlite:///runs/t/trials.db"])
def test_what_would_be_tried_is_told_without_writing_it(tmp_path: Path, sampler: Any, url: str | None) -> None:
    lr = [0.1, 0.2, 1.0] if sampler == "grid" else Space(0.01, 1)
    one = Study("T", "t", tune=Tune(parameters={"lr": lr}, sampler=sampler, trials=3, statistic="final", storage=url))
    root = tmp_path / "runs" / "t"
    (told,) = groups_of(one, cells_of(one), root, writes=False)
    first = [attempt.options for attempt in told.planned(2)]
    assert (len(first), told.choice()) == (3 if sampler == "grid" else 2, None)
    assert not root.exists()
    (group,) = groups_of(one, cells_of(one), root)
    assert [attempt.options for attempt in group.planned(2)] == first
    tune([group], trainer(root, lambda cell: float(cell.options["lr"])), 2)
    (again,) = groups_of(one, cells_of(one), root, writes=False)
    assert again.planned(2) == group.asked()
    assert again.choice() == group.choice() is not None
    again.ask(2)
    assert len(group.asked()) == 3


@pytest.mark.slow
def test_trials_are_kept_in_any_database_of_optuna(tmp_path: Path) -> None:
    for name, best in (("one", 0.1), ("other", 1.0)):
        url = f"sqlite:///{tmp_path / 'runs' / name / 'trials.db'}"
        kept = Tune(parameters={"lr": [0.1, 1.0]}, statistic="final", pruner="median", storage=url)
        of, root = Study("T", name, axes={"rule": RULES}, tune=kept), tmp_path / "runs" / name
        groups = groups_of(of, cells_of(of), root)
        watched = [cell.watch for group in groups for attempt in group.planned(1) for cell in attempt.cells]
        assert [None if watch is None else watch.storage for watch in watched] == [url] * 4
        assert tune(groups, trainer(root, lambda cell, best=best: float(cell.options["lr"] == best)), 1) == Outcome()
        assert not (root / "tuning.log").exists()
        again = groups_of(of, cells_of(of), root)
        assert [choice.options for group in again if (choice := group.choice())] == [{"lr": best}] * 2
    wrong = Study("T", "t", tune=Tune(parameters={"lr": [1]}, storage="nosuch://host/name"))
    with pytest.raises(FederatedError, match="Expected `tune.storage` to be the URL of a database .*nosuch"):
        groups_of(wrong, cells_of(wrong), tmp_path)[0].asked()


def test_trials_are_collected_with_the_best_on_the_test_set_beside(tmp_path: Path) -> None:
    groups = groups_of(study(), cells_of(study()), tmp_path)
    train = trainer(tmp_path, lambda cell: best_at(cell) if "lr" in cell.options else 0.5)
    tune(groups, train, 2)
    assert len(collect(study(), "full", tmp_path)[1]) == 6  # of 8 runs two have been trials
    train(with_choices(study(), cells_of(study()), groups)[0])
    results, missing = collect(study(), "full", tmp_path)
    assert missing == []
    assert len(results.runs) == 8
    assert results.runs[0].chosen == {"lr": "1.0"}
    assert len(results.trials) == (2 + 6) * 2
    assert set(results.trials[0].values) == {"val/acc final", "test/acc best, not to choose by"}
    assert results.trials[0].values["test/acc best, not to choose by"] == 0.7


def test_a_choice_at_an_edge_is_said_before_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A takes the largest rate; B the smallest, with mu inside of its grid."""
    groups = groups_of(study(), cells_of(study()), tmp_path)
    pool = SimpleNamespace(train=trainer(tmp_path, lambda cell: best_at(cell) if "lr" in cell.options else 0.5))
    command._train(study(), cells_of(study()), groups, cast("Pool", pool), 2)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "Tuned to an edge of its grid: lr 1.0, the largest (A); lr 0.1, the smallest (B). "
        "Values beyond it in `tune` may be better."
    )


def test_what_decides_must_have_been_measured(tmp_path: Path) -> None:
    other = study(Tune(parameters={"lr": [1]}, metric="val/f1"))
    with pytest.raises(FederatedError, match=r"Expected `tune.metric` to name a column of .*'val/f1'"):
        tune(groups_of(other, cells_of(other), tmp_path), trainer(tmp_path, best_at), 1)


def test_nothing_is_tuned_where_there_are_no_parameters(tmp_path: Path) -> None:
    assert groups_of(study(Tune()), cells_of(study()), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_the_runs_of_a_large_study_are_laid_out_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {str(number): AxisValue() for number in range(40)}
    large = Study("T", "t", axes={"a": values, "b": values}, tune=replace(GRID, by={}, per=None, at={}))
    yielded = 0

    def counted(of: Study) -> Iterator[dict[str, Name]]:
        nonlocal yielded
        for axes in combinations(of):
            yielded += 1
            yield axes

    monkeypatch.setattr(tuning, "combinations", counted)
    assert len(groups_of(large, cells_of(large), tmp_path)) == yielded == 1600


STAGES = Tune(
    parameters={"lr": [0.1, 1.0, 2.0], "wd": [0, 1]}, by={"rule": {"B": {"mu": [1, 2, 3]}}}, statistic="final",
    stages=[["mu"], ["lr", "wd"]], start={"rule": Name("A")},
)  # fmt: skip


def staged(rules: dict[str, AxisValue]) -> Study:
    return Study("T", "t", axes={"rule": rules}, seeds=[0, 1], tune=STAGES)


def best_in_stages(cell: Cell) -> float:
    """Rate 1 and decay 1 are best for A; B is best with mu 2 where rate and decay are A's, and then at rate 2."""
    lr, wd, mu = (float(cell.options.get(name, 0)) for name in ("lr", "wd", "mu"))
    if not mu:
        return 0.5 * (lr == 1) + 0.1 * wd
    return 0.3 * (mu == 2 and lr == 1 and wd == 1) + 0.6 * (mu == 2 and lr == 2) + 0.9 * (mu == 3 and lr == 0.1)


@pytest.mark.parametrize("rules", [RULES, dict(reversed(RULES.items())), {"B": RULES["B"], "A": RULES["A"]}])
def test_stages_are_as_many_trials_as_their_sum_and_carry_the_choice(rules: dict[str, Any], tmp_path: Path) -> None:
    file = staged(rules)
    groups = groups_of(file, cells_of(file), tmp_path)
    assert tune(groups, trainer(tmp_path, best_in_stages), 2) == Outcome()
    tried = {(group.values["rule"], group.stage): group.asked() for group in groups}
    assert {key: len(one) for key, one in tried.items()} == {("A", 2): 6, ("B", 1): 3, ("B", 2): 6}
    assert [one.options for one in tried["B", 1]] == [{"lr": 1.0, "wd": 1, "mu": mu} for mu in (1, 2, 3)]
    assert {one.options["mu"] for one in tried["B", 2]} == {2}  # 3 were better in the product of all
    tuned, undecided = with_choices(file, cells_of(file), groups)
    assert undecided == []
    chosen = {cell.axes["rule"]: cell.options for cell in tuned}
    assert chosen == {"A": {"lr": 1.0, "wd": 1}, "B": {"lr": 2.0, "wd": 0, "mu": 2}}


def test_stages_go_on_where_they_were_and_the_table_tells_them(tmp_path: Path) -> None:
    file, calls = staged(RULES), list[int]()

    def train(cells: Sequence[Cell], ended: Callable[[Cell, bool], object]) -> Outcome:
        calls.append(sum(done_run(tmp_path, cell) is None for cell in cells))
        outcome = trainer(tmp_path, best_in_stages)(cells, ended)
        return Outcome(outcome.failed, 2) if len(calls) == 2 else outcome

    assert tune(groups_of(file, cells_of(file), tmp_path), train, 1).signum == 2
    assert tune(groups_of(file, cells_of(file), tmp_path), train, 1) == Outcome()
    # A run of B's second stage is the one that the first has chosen.
    assert calls == [6, 3, 0, 0, 5]
    tuned, _ = with_choices(file, cells_of(file), groups_of(file, cells_of(file), tmp_path, writes=False))
    trainer(tmp_path, best_in_stages)(tuned)
    results, missing = collect(file, "full", tmp_path)
    assert missing == []
    assert [(trial.axes["rule"], trial.stage) for trial in results.trials] == (
        [("A", 2)] * 6 + [("B", 1)] * 2 + [("B", 2)] * 6
    )
    write_results(results, tmp_path / "tables")
    assert (tmp_path / "tables" / "tuning.csv").read_text().startswith("rule,seed,stage,chosen lr,")
    assert read_results(tmp_path / "tables").trials == results.trials


def test_who_starts_from_another_is_in_its_share_and_tunes_it_too(tmp_path: Path) -> None:
    file = staged(RULES)
    assert tuned_together(file) == []
    only = [cell for cell in cells_of(file) if cell.axes["rule"] == "B"]
    assert [(group.values["rule"], group.stage) for group in groups_of(file, only, tmp_path)] == [
        ("A", 2), ("B", 1), ("B", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"stages": [["mu"], ["lr"]]}, r"Expected `tune.stages` to have all tuned options, got no stage with 'wd'"),
        ({"stages": [["mu", "x"], ["lr", "wd"]]}, r"Expected `tune.stages` to name tuned options .*got 'x'"),
        ({"stages": []}, r"Expected `tune.stages` with `tune.start`"),
    ],
)
def test_stages_that_do_not_fit_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederatedError, match=sentence):
        expect_sound_stages(replace(staged(RULES), tune=replace(STAGES, **changed)))


@pytest.mark.parametrize(
    ("metric", "goal", "chosen"),
    [("val/rmse", None, 0.1), ("val/rmse", "max", 1.0), ("val/x", "min", 0.1), ("val/x", "max", 1.0)],
)
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_the_goal_of_what_decides_is_that_of_its_name_or_of_the_option(
    tmp_path: Path, metric: str, goal: Any, chosen: float, sampler: Any
) -> None:
    tune_by = Tune(
        parameters={"lr": [0.1, 1.0]}, metric=metric, goal=goal, statistic="final", sampler=sampler, trials=2
    )
    one = study(tune_by)
    groups = groups_of(one, cells_of(one), tmp_path)
    tune(groups, trainer(tmp_path, lambda cell: float(cell.options["lr"]), metric=metric), 2)
    found = {attempt.options["lr"] for group in groups if (attempt := group.choice()) is not None}
    tried = {attempt.options["lr"] for attempt in groups[0].asked()}
    assert found == {chosen if tried == {0.1, 1.0} else tried.pop()}
    wanted = "MINIMIZE" if chosen == 0.1 else "MAXIMIZE"
    assert {group._optuna.direction.name for group in groups} == {wanted}


def test_a_tuning_by_what_nobody_knows_is_refused_before_any_run(tmp_path: Path) -> None:
    one = study(replace(GRID, metric="val/daytime"))
    with pytest.raises(FederatedError, match=r"^Expected `tune.goal` to say .* of 'val/daytime' is the best"):
        expect_sound(one)
    expect_sound(replace(one, tune=replace(one.tune, goal="min")))
